"""Issue every collective of the engine: each is counted, logged by unit, and explained when it fails.

Ranks must issue the same collectives in the same order. Each one is folded into a running hash, which the
ranks compare once per optimizer step over host memory, without waiting for the device. If hashes differ, or a
collective fails, the ranks exchange their logs through the group's store, and the error names the first
difference, the rank whose collective failed first, or the ranks that did not answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NoReturn
from zlib import crc32

import torch
from torch import Tensor

from accelz import HOST, Accelerator, CollectiveError, Group, Handle, ReduceOp
from accelz.ranks.exchange import Exchange, unused_key
from zero.communication.differences import first_line, first_setting
from zero.communication.disk_errors import PostponedDiskErrors
from zero.communication.failures import Entry, Failures
from zero.communication.job import JobGroups, Split, explained
from zero.communication.ledger import Ledger, Traffic
from zero.errors import CommunicationError, RankMismatchError


class NamedHandle:
    """A collective under way that knows which unit it serves."""

    def __init__(
        self,
        handle: Handle,
        waiting: Callable[[], AbstractContextManager[None]],
        explain: Callable[[CollectiveError], NoReturn],
    ) -> None:
        self._handle = handle
        self._waiting = waiting
        self._explain = explain

    def wait(self) -> None:
        """Order what follows after the collective. Raises CommunicationError."""
        try:
            with self._waiting():
                self._handle.wait()
        except CollectiveError as error:
            self._explain(error)


class Communicator:
    """Collectives by unit name.

    groups: as joined for this engine, the newest. name: the model's class, for messages. outlive_launcher: as
    in Config. key: prefix for the engine's own keys in the store. peers: the ranks' processes.

    group: all ranks of the job. After `split`, shards: the ranks that share a copy of the model with
    this one; replicas: the ranks that have the same slices as this one, None if there is one copy.

    in_pass: inside something that ends with an agreement of the ranks, such as a forward or backward.
    """

    def __init__(
        self, accelerator: Accelerator, groups: JobGroups, name: str, outlive_launcher: bool = False
    ) -> None:
        self._launch = None if outlive_launcher else groups.job.launch
        self._collectives = accelerator.collectives
        self._control = groups.control
        self.group = self.shards = groups.data
        self.replicas: Group | None = None
        self.ledger = Ledger(groups, name)
        self.in_pass = False
        self.peers = groups.job.peers
        self.key, self._values = explained(
            lambda: (
                unused_key(self.group, "zero/engine"),
                Exchange(self.group, "zero/values", self.peers),
            ),
            self.group.timeout,
        )
        self._disk_errors = PostponedDiskErrors(alone=self.group.size == 1)

    @property
    def traffic(self) -> Traffic:
        return self.ledger.traffic

    @property
    def failed(self) -> bool:
        """Whether a collective has failed: nothing can be exchanged any more."""
        return bool(self.ledger.line.failures.first)

    @property
    def issued(self) -> int:
        """How many collectives and exchanges there have been so far."""
        return self.ledger.count

    def waiting(self, what: str, limit: float) -> AbstractContextManager[None]:
        """Wrap a wait for other ranks in something else than a collective, so that they can be told of it.

        what: the call to name. limit: seconds after which it fails.
        """
        line = self.ledger.line
        return line.watch.waiting(line.count, what, limit)

    def whereabouts(self, ranks: Iterable[int]) -> str:
        """Say where ranks wait that are missed now, as far as they have told; "" if they have not."""
        line = self.ledger.line
        return line.watch.describe(ranks, line.count)

    def split(self, split: Split) -> None:
        """Gather and reduce slices as `split` says from now on."""
        self.shards, self.replicas = split.shards, split.replicas

    def all_gather(self, unit: str, output: Tensor, shard: Tensor) -> NamedHandle:
        """All-gather over the ranks of a copy."""
        output, shard = _transportable(output), _transportable(shard)
        return self._issue(
            "all_gather",
            unit,
            output.numel(),
            output.dtype,
            self.shards,
            lambda: self._collectives.all_gather(output, shard, self.shards, async_op=True),
        )

    def reduce_scatter(self, unit: str, output: Tensor, full: Tensor) -> NamedHandle:
        """Reduce-scatter over the ranks of a copy; `all_reduce_replicas` then adds up all copies."""
        return self._issue(
            "reduce_scatter",
            unit,
            full.numel(),
            full.dtype,
            self.shards,
            lambda: self._collectives.reduce_scatter(output, full, self.shards, async_op=True),
        )

    def all_to_all(
        self,
        unit: str,
        output: Tensor,
        parts: Tensor,
        received: Sequence[int],
        sent: Sequence[int],
        total: int,
    ) -> NamedHandle:
        """All-to-all over the ranks of a copy. total: elements that all of them send together."""
        return self._issue(
            "all_to_all",
            unit,
            total,
            parts.dtype,
            self.shards,
            lambda: self._collectives.all_to_all(output, parts, received, sent, self.shards, async_op=True),
        )

    def all_reduce(self, unit: str, tensor: Tensor, op: ReduceOp = "sum") -> NamedHandle:
        """All-reduce over the ranks of a copy."""
        return self._all_reduce(unit, tensor, op, self.shards)

    def all_reduce_replicas(self, unit: str, tensor: Tensor, op: ReduceOp = "sum") -> NamedHandle:
        """All-reduce over the ranks that have the same slices, in several copies of the model."""
        assert self.replicas is not None
        return self._all_reduce(unit, tensor, op, self.replicas)

    def _all_reduce(self, unit: str, tensor: Tensor, op: ReduceOp, group: Group) -> NamedHandle:
        return self._issue(
            "all_reduce",
            unit,
            tensor.numel(),
            tensor.dtype,
            group,
            lambda: self._collectives.all_reduce(tensor, group, op, async_op=True),
        )

    def broadcast(self, unit: str, tensor: Tensor, source: int) -> None:
        """Broadcast from rank `source` of the job to all ranks, and wait. tensor: (n,), contiguous."""
        tensor = _transportable(tensor)
        self._issue(
            "broadcast",
            unit,
            tensor.numel(),
            tensor.dtype,
            self.group,
            lambda: self._collectives.broadcast(tensor, source, self.group, async_op=True),
            f" from rank {source}",
        ).wait()

    def check(self) -> None:
        """Raise CommunicationError if the library has aborted a collective asynchronously.

        Raises RankMismatchError if the ranks had issued different collectives. What was computed from an
        aborted one is worthless. After `streams.synchronize()` no abort is missed.
        """
        groups = {id(group): group for group in (self.group, self.shards, self.replicas) if group is not None}
        try:
            for group in groups.values():
                self._collectives.check(group)
        except CollectiveError as error:
            self.ledger.line.failures.aborted(error)

    def agree(self, flag: bool = False, settings: Callable[[], Mapping[str, Any]] = dict) -> bool:
        """Check that all ranks issued the same collectives so far; return whether any rank passes `flag`.

        settings(): JSON values by name, which must be the same on all ranks. Blocks the host until every rank
        is here; the device is not involved. Raises RankMismatchError, and on every rank an OffloadError that
        any rank has postponed, and CommunicationError if what holds the job together has ended for any.
        """
        gone = self._launch.gone if self._launch else ""
        if self.group.size == 1:
            self._check_launch(gone)
            return flag
        own = settings()
        mine = [*self.ledger.hashes, crc32(repr(own).encode())]
        votes = [flag, bool(self._disk_errors.own), bool(gone), *mine, *(-h for h in mine)]
        ballot = torch.tensor(votes, dtype=torch.int64, device=HOST)
        self._exchange("agreement", ballot)
        flagged, failed, abandoned, *hashes = ballot.tolist()
        highest, lowest = hashes[: len(mine)], hashes[len(mine) :]
        *issued, same_settings = (high == -low for high, low in zip(highest, lowest, strict=True))
        if not all(issued):
            self.ledger.line.failures.mismatch()
        self._check_launch(gone or "a process that another rank depends on" * abandoned)
        if failed:
            self._disk_errors.share(self.all_gather_object(self._disk_errors.own))
        if not same_settings:
            raise RankMismatchError(f"{first_setting(self.all_gather_object(dict(own)))}. {_SETTINGS_ADVICE}")
        return bool(flagged)

    def _check_launch(self, gone: str) -> None:
        if gone:
            raise CommunicationError(
                f"rank {self.group.rank} ends, as {gone} has ended: nothing would end the ranks, start them "
                "again or save what they have trained. Start a new job from the last checkpoint; to train on "
                "in such a case, set Config(outlive_launcher=True)"
            )

    def postponing_disk_errors(self) -> AbstractContextManager[None]:
        """Postpone an OffloadError of the block to the next `agree`, so that no rank waits for this one.

        The block's result is then missing, and nothing computed until that `agree` may be kept.
        """
        return self._disk_errors.postponing()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Wrap collective work of all ranks, which `agree` at its end.

        Errors of any rank's disk in the block are raised on every rank when it ends.
        """
        before, self.in_pass = self.in_pass, True
        try:
            yield
        finally:
            self.in_pass = before
        self.agree()

    def barrier(self, what: str) -> None:
        """Wait until every rank has come here and finished all reading and writing before it."""
        self._exchange(what, torch.zeros(1, dtype=torch.int64, device=HOST))

    def all_reduce_or(self, flags: Tensor) -> Tensor:
        """Take the elementwise "or" of host uint8 flags over the ranks, in place."""
        if self.group.size > 1:
            self._exchange("usage", flags)
        return flags

    def highest(self, what: str, numbers: Tensor) -> Tensor:
        """Take the elementwise maximum of host int64 numbers over the ranks, in place. Blocks the host."""
        if self.group.size > 1:
            self._exchange(what, numbers)
        return numbers

    def start_or(self, what: str, flags: Tensor) -> NamedHandle:
        """Begin to take the elementwise "or" of host uint8 flags over the ranks, in place."""
        line = self.ledger.line
        line.failures.check()
        entry = self.ledger.exchange(what)
        waiting = partial(line.watch.waiting, entry.number, entry.text)
        explain = partial(line.failures.explain, entry=entry, among="")
        try:
            with waiting():  # the first use of a size may wait for the other ranks
                handle = self._collectives.all_reduce(flags, self._control, "max", async_op=True)
        except CollectiveError as error:
            explain(error)
        return NamedHandle(handle, waiting, explain)

    def check_equal(self, facts: Mapping[str, str]) -> None:
        """Raise RankMismatchError unless every rank passes the same text under every name.

        facts: the same names on all ranks. A text has a fact a line; the error shows the first that differs.
        """
        if self.group.size == 1:
            return
        mine = [crc32(text.encode()) for text in facts.values()]
        ballot = torch.tensor([mine, [-each for each in mine]], dtype=torch.int64, device=HOST)
        self._exchange("settings and model", ballot)
        highest, lowest = ballot.tolist()
        unequal = [what for what, high, low in zip(facts, highest, lowest, strict=True) if high != -low]
        if unequal:
            every = self.all_gather_object(facts[unequal[0]].splitlines())
            raise RankMismatchError(
                f"the ranks disagree about {' and '.join(unequal)}, which must be the same on all ranks: "
                f"{first_line(every)}"
            )

    def broadcast_object(self, value: Any) -> Any:
        """Return rank 0's JSON value on every rank. Blocks the host."""
        return self.all_gather_object(value if self.group.rank == 0 else None)[0]

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every rank's JSON value, by rank. Blocks the host."""
        if self.group.size == 1:
            return [json.loads(json.dumps(value))]  # what other world sizes would see
        self.check()
        line = self.ledger.line
        try:
            with line.watch.waiting(line.count, "exchange of values"):
                return self._values(value)
        except RuntimeError as error:
            raise CommunicationError(
                f"rank {self.group.rank} did not get the other ranks' state: {error}. All ranks must make "
                "the same calls: look at the output of the others first"
            ) from error

    def _exchange(self, what: str, tensor: Tensor) -> None:
        """All-reduce (max) in host memory, outside of the hashed sequence."""
        self.check()
        line, entry = self.ledger.line, self.ledger.exchange(what)
        try:
            with line.watch.waiting(entry.number, entry.text):
                self._collectives.all_reduce(tensor, self._control, "max")
        except CollectiveError as error:
            line.failures.explain(error, entry, "")

    def _issue(
        self,
        op: str,
        unit: str,
        numel: int,
        dtype: torch.dtype,
        group: Group,
        call: Callable[[], Handle],
        origin: str = "",
    ) -> NamedHandle:
        """Enter and issue a collective. numel: of the whole buffer, equal on all ranks."""
        line = self.ledger.line
        line.failures.check()
        entry = self.ledger.collective(op, unit, numel, dtype, origin)
        waiting = partial(line.watch.waiting, entry.number, entry.text)
        explain = partial(self._explain, failures=line.failures, entry=entry, group=group)
        try:
            with waiting():  # first uses of a size may wait for the other ranks
                return NamedHandle(call(), waiting, explain)
        except CollectiveError as error:
            explain(error)

    def _explain(self, error: CollectiveError, failures: Failures, entry: Entry, group: Group) -> NoReturn:
        failures.explain(error, entry, self._numbers(group))

    def _numbers(self, group: Group) -> str:
        """Translate a group's rank numbers to the job's, for errors; "" if they are the same."""
        if group.size == self.group.size:
            return ""
        first = self.group.rank - self.shards.rank
        ranks = range(first, first + self.shards.size)
        if group is self.replicas:
            ranks = range(self.shards.rank, self.group.size, self.shards.size)
        return (
            f" (ranks 0 to {group.size - 1} of this group are ranks {', '.join(map(str, ranks))} of the job)"
        )


def _transportable(tensor: Tensor) -> Tensor:
    """View dtypes that communication libraries may not know as bytes, which are only copied, never summed.

    The view is made outside of inference mode, as the collective may complete outside of it.
    """
    with torch.inference_mode(False):
        summed = tensor.is_floating_point() and tensor.element_size() > 1
        return tensor if summed else tensor.view(torch.uint8)


_SETTINGS_ADVICE = (
    "Every rank steps its part of one model and must do so in the same way: if a scheduler follows a loss, "
    "as ReduceLROnPlateau does, give it the mean over the ranks"
)
