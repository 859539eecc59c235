"""Issue every collective of the engine: each is counted, logged by unit, and explained when it fails.

Ranks must issue the same collectives in the same order. Each one is folded into a running hash, which the
ranks compare once per optimizer step over host memory, without waiting for the device. If hashes differ, or a
collective fails, the ranks exchange their logs through the group's store, and the error names the first
difference, the rank whose collective failed first, or the ranks that did not answer.
"""

from __future__ import annotations

import json
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any, NoReturn
from zlib import crc32

import torch
from torch import Tensor

from accelz.accelerator import Accelerator
from accelz.collectives import Group, Handle, ReduceOp
from accelz.errors import CollectiveError
from accelz.flat_buffer import HOST
from accelz.polled_store import exchange
from zero.communication.job import Split
from zero.communication.reports import Failure, Reports
from zero.communication.watch import Watch
from zero.errors import CommunicationError, OffloadError, RankMismatchError

LOG_LENGTH = 256


@dataclass
class Traffic:
    """Counts of collectives issued, and their bytes.

    Bytes are those of the gathered, scattered or reduced whole buffer, or of all that ranks send in an
    all-to-all.
    """

    calls: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)

    def clear(self) -> None:
        self.calls.clear()
        self.bytes.clear()


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

    group: all ranks of the job. control: a second group of the same ranks, for host memory, whose traffic
    must not interleave with the data's. After `split`, shards: the ranks that share a copy of the model with
    this one; replicas: the ranks that have the same slices as this one, None if there is one copy.

    A rank whose disk fails continues to take part in the collectives of the others, with whatever values
    there are, and reports the error in the next `agree`: until then the error is *postponed*. in_pass: inside
    something that ends with an agreement of the ranks, such as a forward or backward.
    """

    def __init__(self, accelerator: Accelerator, group: Group, control: Group, key: str) -> None:
        self._collectives = accelerator.collectives
        self._control = control
        self.group = self.shards = group
        self.replicas: Group | None = None
        self.traffic = Traffic()
        self._key = key  # prefix in the store, one per engine
        self._reports = Reports(group, key)
        self.in_pass = False
        self._disk_error = ""  # of this rank, postponed
        self._shared_disk_error = ""  # the last one that was raised on all ranks
        self.failed = ""  # what failed; nothing can be exchanged after that
        self._count = 0
        self._shared = 0
        # Running hashes: of reductions and of everything else separately, since a graph that is partly on the
        # host may run either sooner; and of all in order, as libraries with one queue need one order.
        self._hashes = {"reductions": 0, "others": 0}
        self.sequence = 0
        self._log: deque[tuple[int, str]] = deque(maxlen=LOG_LENGTH)
        self._watch = Watch(group, key, self._log)

    @property
    def issued(self) -> int:
        """How many collectives and exchanges there have been so far."""
        return self._count

    def waiting(self, what: str, limit: float) -> AbstractContextManager[None]:
        """Wrap a wait for other ranks in something else than a collective, so that they can be told of it.

        what: the call to name. limit: seconds after which it fails.
        """
        return self._watch.waiting(self._count, what, limit)

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
            difference = "" if self.failed else self._difference()
            self.failed = self.failed or str(error)
            if difference:  # libraries abort, too, where ranks meet in collectives of different sizes
                raise RankMismatchError(f"{difference}. {_ADVICE}") from error
            raise CommunicationError(f"rank {self.group.rank}: {error}. {_WORTHLESS}") from error

    def agree(self, flag: bool = False, settings: Callable[[], Mapping[str, Any]] = dict) -> bool:
        """Check that all ranks issued the same collectives so far; return whether any rank passes `flag`.

        settings(): JSON values by name, which must be the same on all ranks. Blocks the host until every rank
        is here; the device is not involved. Raises RankMismatchError, and on every rank an OffloadError that
        any rank has postponed.
        """
        if self.group.size == 1:
            return flag
        own = settings()
        mine = [*self._hashes.values(), crc32(repr(own).encode())]
        votes = [flag, bool(self._disk_error), *mine, *(-h for h in mine)]
        ballot = torch.tensor(votes, dtype=torch.int64, device=HOST)
        self._exchange("agreement", ballot)
        flagged, failed, *hashes = ballot.tolist()
        *issued, same_settings = (high == -low for high, low in zip(hashes[:3], hashes[3:], strict=True))
        if not all(issued):
            self._explain_mismatch()
        if failed:
            self._raise_disk_error()
        if not same_settings:
            self._explain_settings(own)
        return bool(flagged)

    @contextmanager
    def postponing_disk_errors(self) -> Iterator[None]:
        """Postpone an OffloadError of the block to the next `agree`, so that no rank waits for this one.

        The block's result is then missing, and nothing computed until that `agree` may be kept.
        """
        try:
            yield
        except OffloadError as error:
            if self.group.size == 1 or str(error) == self._shared_disk_error:
                raise
            self._disk_error = self._disk_error or str(error)

    @contextmanager
    def sharing_disk_errors(self) -> Iterator[None]:
        """Wrap collective work of all ranks, and share their disk errors at its end.

        An OffloadError that any rank postpones in the block is raised on every rank when the block ends.
        """
        before, self.in_pass = self.in_pass, True
        try:
            yield
        finally:
            self.in_pass = before
        self.agree()

    def _raise_disk_error(self) -> NoReturn:
        causes = self.all_gather_object(self._disk_error)
        self._disk_error = ""
        self._shared_disk_error = next(f"rank {rank}: {cause}" for rank, cause in enumerate(causes) if cause)
        raise OffloadError(self._shared_disk_error)

    def barrier(self, what: str) -> None:
        """Wait until every rank has come here and finished all reading and writing before it."""
        self._exchange(what, torch.zeros(1, dtype=torch.int64, device=HOST))

    def all_reduce_or(self, flags: Tensor) -> Tensor:
        """Take the elementwise "or" of host uint8 flags over the ranks, in place."""
        if self.group.size > 1:
            self._exchange("usage", flags)
        return flags

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
                f"{_first_difference(every)}"
            )

    def broadcast_object(self, value: Any) -> Any:
        """Return rank 0's JSON value on every rank. Blocks the host."""
        return self.all_gather_object(value if self.group.rank == 0 else None)[0]

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every rank's JSON value, by rank. Blocks the host."""
        if self.group.size == 1:
            return [json.loads(json.dumps(value))]  # what other world sizes would see
        self.check()
        self._shared += 1
        group, key, own = self.group, f"{self._key}/share", json.dumps(value)
        try:
            with self._watch.waiting(self._count, "exchange of values"):
                every = exchange(group.store, key, self._shared, group.rank, group.size, own, group.timeout)
        except RuntimeError as error:
            raise CommunicationError(
                f"rank {self.group.rank} did not get the other ranks' state: {error}. All ranks must make "
                "the same calls: look at the output of the others first"
            ) from error
        return [json.loads(each) for each in every]

    def _exchange(self, what: str, tensor: Tensor) -> None:
        """All-reduce (max) in host memory, outside of the hashed sequence."""
        self.check()
        self._count += 1
        text, began = f"{what} exchange", time.monotonic()
        self._log.append((self._count, text))
        try:
            with self._watch.waiting(self._count, text):
                self._collectives.all_reduce(tensor, self._control, "max")
        except CollectiveError as error:
            self._explain(error, self._count, text, began, self._control)

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
        """Count, log and issue a collective. numel: of the whole buffer, equal on all ranks."""
        if self.failed:
            raise CommunicationError(
                f"no collective is possible after an earlier failure: {self.failed}. Start a new job from "
                "the last checkpoint"
            )
        text = f"{op} of unit {unit!r} ({numel} x {str(dtype).removeprefix('torch.')}){origin}"
        self._count += 1
        kind = "reductions" if op in ("reduce_scatter", "all_reduce") else "others"
        self._hashes[kind] = crc32(text.encode(), self._hashes[kind])
        self.sequence = crc32(text.encode(), self.sequence)
        self._log.append((self._count, text))
        self.traffic.calls[op] += 1
        self.traffic.bytes[op] += numel * dtype.itemsize
        began = time.monotonic()
        waiting = partial(self._watch.waiting, self._count, text)
        explain = partial(self._explain, number=self._count, text=text, began=began, group=group)
        try:
            with waiting():  # first uses of a size may wait for the other ranks
                return NamedHandle(call(), waiting, explain)
        except CollectiveError as error:
            explain(error)

    def _explain(
        self, error: CollectiveError, number: int, text: str, began: float, group: Group
    ) -> NoReturn:
        cause = " ".join(str(error).split()) + self._numbers(group)
        self.failed = self.failed or cause
        failure = Failure(number, text, time.monotonic() - began, cause)
        reports = self._reports.exchange(dict(self._log), failure)
        difference = self._reports.difference(dict(self._log), reports)
        if difference:
            raise RankMismatchError(f"{difference}. {_ADVICE}") from error
        silent = [rank for rank in range(self.group.size) if rank not in reports]
        described = self._reports.describe(failure, reports, self._watch.places(silent, failure.number))
        raise CommunicationError(described) from error

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

    def _explain_mismatch(self) -> NoReturn:
        self.failed = "the ranks issued different collectives"
        raise RankMismatchError(f"{self._difference() or self.failed}. {_ADVICE}")

    def _explain_settings(self, own: Mapping[str, Any]) -> NoReturn:
        every = self.all_gather_object(dict(own))
        name, rank = next(
            (name, rank)
            for rank, theirs in enumerate(every)
            for name in {**every[0], **theirs}
            if repr(every[0].get(name, "missing")) != repr(theirs.get(name, "missing"))  # NaN equals NaN
        )
        first, other = (every[r].get(name, "missing") for r in (0, rank))
        values = f"{first} on rank 0 and {other} on rank {rank}"
        raise RankMismatchError(f"{name} is {values}. {_SETTINGS_ADVICE}")

    def _difference(self) -> str:
        """Say where the ranks' collectives diverge; "" if they agree."""
        log = dict(self._log)
        return self._reports.difference(log, self._reports.exchange(log))


def _first_difference(every: Sequence[Sequence[str]]) -> str:
    """Show the first line in which a rank differs from rank 0. every: lines by rank, not all equal."""
    rank, first, other = next(
        (rank, first, other)
        for rank, lines in enumerate(every)
        for first, other in zip_longest(every[0], lines)
        if first != other
    )
    if first is None:
        return f"{other} on rank {rank}, which rank 0 does not have"
    if other is None:
        return f"{first} on rank 0, which rank {rank} does not have"
    return f"{first} on rank 0 and {other} on rank {rank}"


def _transportable(tensor: Tensor) -> Tensor:
    """View dtypes that communication libraries may not know as bytes, which are only copied, never summed.

    The view is made outside of inference mode, as the collective may complete outside of it.
    """
    with torch.inference_mode(False):
        return tensor if tensor.is_floating_point() else tensor.view(torch.uint8)


_WORTHLESS = (
    "Everything computed since then is invalid on all ranks, possibly including the last optimizer step: "
    "check the ranks' logs for the one that failed first, and start a new job from the last checkpoint"
)
_ADVICE = (
    "Every rank must run the same modules in the same order; a branch that depends on the rank's data is "
    "the usual cause. If a mixture's experts are units, name the block around them with Config(units=...)"
)
_SETTINGS_ADVICE = (
    "Every rank steps its part of one model and must do so in the same way: if a scheduler follows a loss, "
    "as ReduceLROnPlateau does, give it the mean over the ranks"
)
