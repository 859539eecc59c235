"""Issue every collective of the engine: each is counted, logged by unit, and explained when it fails.

Ranks must issue the same collectives in the same order. Each one is folded into a running hash, which the
ranks compare once per optimizer step over host memory, without waiting for the device. If hashes differ, or a
collective fails, the ranks exchange their logs through the group's store, and the error names the first
difference, the rank whose collective failed first, or the ranks that did not answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from accelz import HOST, Accelerator, CollectiveError, Group, Handle, ReduceOp
from accelz.ranks.exchange import Exchange, unused_key
from zero.communication.differences import LACKS, first_line, first_setting
from zero.communication.disk_errors import PostponedDiskErrors
from zero.communication.grid import Grid
from zero.communication.job import JobGroups, explained
from zero.communication.ledger import Ledger
from zero.communication.line import Line
from zero.communication.mesh import Mesh
from zero.communication.reports import Issued, not_everywhere
from zero.errors import CommunicationError, RankMismatchError
from zero.observe.observation import Observation
from zero.warning import warn

SPREAD_BYTES = 4 << 20
"""Of one broadcast of first values: libraries may keep room for the largest message there has been."""


@dataclass(slots=True, eq=False)
class NamedHandle:
    """A collective under way that knows which unit it serves. mark(): called before and after it is waited
    for."""

    _handle: Handle
    _issued: Issued
    _line: Line
    _ranks: Group
    _mark: Callable[[], None] | None = None

    def wait(self) -> None:
        """Order what follows after the collective. Raises CommunicationError."""
        waits = self._line.waits
        wait = waits.begin(self._issued.number, self._issued.text)
        self._issued.state = "waited for"
        if self._mark is not None:
            self._mark()
        try:
            self._handle.wait()
        except CollectiveError as error:
            self._line.failures.explain(error, self._issued, self._ranks)
        except BaseException:
            waits.forget()
            self._issued.state = "failed"
            raise
        waits.over(wait)
        self._issued.state = "done"
        if self._mark is not None:
            self._mark()


class Communicator:
    """Collectives by unit name.

    groups: as joined for this engine, the newest. name: the model's class, for messages. outlive_launcher: as
    in Config. key: prefix for the engine's own keys in the store. peers: the ranks' processes.

    group: the engine's ranks, which have different data and issue the same. whole: all ranks of the job,
    which are more where its mesh has other dimensions than those of the data. alike: those whose models have
    the same structure. Collectives of a group of parameters are over the ranks of its mesh.
    observation: what the engine's parts report to.

    in_pass: inside something that ends with an agreement of the ranks, such as a forward or backward.
    norm_is_read: whether the norm of the gradients is read, on this rank so far or, since the last agreement,
    on any.
    """

    def __init__(
        self, accelerator: Accelerator, groups: JobGroups, name: str, outlive_launcher: bool = False
    ) -> None:
        self._launch = None if outlive_launcher else groups.job.launch
        self._collectives = accelerator.collectives
        self._control = groups.control
        self._groups = groups
        self.group = groups.data
        self.whole = groups.whole
        self.alike = groups.part(groups.grid.parts(groups.grid.alike))
        self._others: dict[int, Group] = {}  # that collectives were issued over, by id
        self.ledger = Ledger(groups, name)
        self.observation = Observation(accelerator)
        self.in_pass = False
        self.norm_is_read = False
        self.peers = groups.job.peers
        mine = self.peers.of(groups.ranks)
        self.key, self._values, everywhere = explained(
            lambda: (
                unused_key(self.whole, "zero/engine"),
                Exchange(self.group, "zero/values", mine),
                Exchange(self.whole, "zero/everywhere", self.peers) if self.divided else None,
            ),
            self.group.timeout,
        )
        self._everywhere = everywhere or self._values
        self._alike = self._values if self.alike is self.group else self._everywhere
        if self.alike is not self.group and self.alike is not self.whole:
            members = self.peers.of(self.grid.part(self.whole.rank, self.grid.alike))
            self._alike = explained(lambda: Exchange(self.alike, "zero/alike", members), self.group.timeout)
        self._disk_errors = PostponedDiskErrors(alone=self.group.size == 1)
        self._untold = False  # whether there are notes that no `agree` has shared

    @property
    def divided(self) -> bool:
        """Whether the job has other ranks than `group`."""
        return self.whole is not self.group

    @property
    def grid(self) -> Grid:
        """How the job's ranks are arranged."""
        return self._groups.grid

    def name(self, rank: int) -> str:
        """Say for messages which rank one of `group` is: its number in the job, and its coordinates."""
        return self.grid.name(self._groups.ranks[rank])

    def started(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """The numbers of ranks of the job among all that were started."""
        return self._groups.job.started(ranks)

    def part(self, along: Collection[str]) -> Group:
        """The ranks that differ from this one in these dimensions of the job's mesh alone, and this one; once
        `make_parts` has made them."""
        return self._groups.part(self.grid.parts(along))

    def make_parts(self, wanted: Iterable[Collection[str]]) -> None:
        """Make the groups that `part` gives, where any rank wants some. Collective."""
        if self.grid.told:
            every = self.everywhere(sorted({tuple(sorted(along)) for along in wanted}))
            for along in sorted({tuple(each) for rank in every for each in rank}):
                self.part(along)

    @property
    def failed(self) -> bool:
        """Whether a collective has failed: nothing can be exchanged any more."""
        return bool(self._groups.line.failures.first)

    @property
    def issued(self) -> int:
        """How many collectives and exchanges there have been so far."""
        return self.ledger.count

    @property
    def waited(self) -> float:
        """Seconds of the host in collectives so far."""
        return self._groups.line.waits.seconds

    def waiting(self, what: str, limit: float) -> AbstractContextManager[None]:
        """Wrap a wait for other ranks in something else than a collective, so that they can be told of it.

        what: the call to name. limit: seconds after which it fails.
        """
        line = self._groups.line
        return line.waits.waiting(line.count, what, limit)

    def whereabouts(self, ranks: Iterable[int]) -> str:
        """Say where ranks of the job wait that are missed now, as far as they have told; "" if they have
        not."""
        line = self._groups.line
        return line.waits.describe(ranks, line.count)

    def all_gather(self, unit: str, output: Tensor, shard: Tensor, ranks: Group) -> NamedHandle:
        output, shard = _transportable(output), _transportable(shard)
        issued = self._enter("all_gather", unit, output.numel(), output.dtype, ranks)
        return self._start(issued, ranks, self._collectives.all_gather, output, shard, ranks)

    def reduce_scatter(self, unit: str, output: Tensor, full: Tensor, ranks: Group) -> NamedHandle:
        issued = self._enter("reduce_scatter", unit, full.numel(), full.dtype, ranks)
        return self._start(issued, ranks, self._collectives.reduce_scatter, output, full, ranks)

    def all_to_all(
        self,
        unit: str,
        output: Tensor,
        parts: Tensor,
        received: Sequence[int],
        sent: Sequence[int],
        total: int,
        ranks: Group,
    ) -> NamedHandle:
        """total: elements that all ranks send together."""
        issued = self._enter("all_to_all", unit, total, parts.dtype, ranks)
        return self._start(issued, ranks, self._collectives.all_to_all, output, parts, received, sent, ranks)

    def all_reduce(self, unit: str, tensor: Tensor, ranks: Group, op: ReduceOp = "sum") -> NamedHandle:
        issued = self._enter("all_reduce", unit, tensor.numel(), tensor.dtype, ranks)
        return self._start(issued, ranks, self._collectives.all_reduce, tensor, ranks, op)

    def broadcast(self, unit: str, tensor: Tensor, source: int, ranks: Group | None = None) -> None:
        """Broadcast from a rank of `ranks` (None: `group`) to all of them, and wait. tensor: (n,),
        contiguous."""
        tensor, ranks = _transportable(tensor), ranks or self.group
        origin = f" from rank {source}"
        issued = self._enter("broadcast", unit, tensor.numel(), tensor.dtype, ranks, origin)
        self._start(issued, ranks, self._collectives.broadcast, tensor, source, ranks).wait()

    def spread(self, unit: str, tensor: Tensor, mesh: Mesh, source: int = 0) -> None:
        """Give every rank of a mesh the values of the one that is in the place of rank `source` of `group`,
        and wait. Ranks that differ along `mesh.apart` keep different values. tensor: as in `broadcast`."""
        for part in tensor.split(SPREAD_BYTES // tensor.element_size()):
            if mesh.data.size > 1:
                self.broadcast(unit, part, mesh.places[source], mesh.data)
            if mesh.beyond is not None:
                self.broadcast(unit, part, 0, mesh.beyond)

    def check(self) -> None:
        """Raise CommunicationError if the library has aborted a collective asynchronously.

        Raises RankMismatchError if the ranks had issued different collectives. What was computed from an
        aborted one is worthless. After `streams.synchronize()` no abort is missed.
        """
        try:
            for ranks in (self.group, *self._others.values()):
                self._collectives.check(ranks)
        except CollectiveError as error:
            self._groups.line.failures.aborted(error)

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
        flags = [flag, bool(self._disk_errors.own), bool(gone), self._untold, self.norm_is_read]
        any_rank, (*issued, same_settings) = self._vote("agreement", flags, mine)
        flagged, failed, abandoned, untold, self.norm_is_read = any_rank
        if not all(issued):
            self._groups.line.failures.mismatch()
        self._check_launch(gone or "a process that another rank depends on" * abandoned)
        if failed:
            self._disk_errors.share(self.all_gather_object(self._disk_errors.own))
        if not same_settings:
            raise RankMismatchError(
                f"{first_setting(self.all_gather_object(dict(own)), self.name)}. {_SETTINGS_ADVICE}"
            )
        if untold:
            self._tell_of_others()
        return flagged

    def check_alike(self, settings: Callable[[], Mapping[str, Any]]) -> None:
        """Check settings as `agree` does, among the ranks whose models are alike, where these are more than
        `group`. Blocks the host. Raises RankMismatchError."""
        if self.alike.size == self.group.size:
            return
        own = dict(settings())
        _, (same,) = self._vote("settings", [], [crc32(repr(own).encode())], self.alike)
        if not same:
            names = [self.grid.name(rank) for rank in self.grid.part(self.whole.rank, self.grid.alike)]
            told = first_setting(self.all_gather_alike(own), names.__getitem__)
            raise RankMismatchError(f"{told}. {_SETTINGS_ADVICE}")

    @contextmanager
    def telling(self, about: str, what: str) -> Iterator[None]:
        """Warn the job, after the block, of what happens on this rank and maybe on it alone.

        Rank 0 warns at once, for all ranks that tell the same, and of others' at the next `agree`. If a
        collective fails before that, in the block or after it, the error has it. about: what is the same on
        all ranks to which this happens. what: a clause, why and how it happened here.
        """
        notes = self._groups.line.failures.notes
        notes[about] = what
        try:
            yield
        except BaseException:
            del notes[about]
            raise
        self._untold = self.group.rank > 0
        warn(f"zero: {what}", rank=self.group.rank)

    def _tell_of_others(self) -> None:
        self._untold = False
        every = self.all_gather_object(self._groups.line.failures.notes)
        for ranks, what in not_everywhere(dict(enumerate(every)), self.group.size):
            if 0 not in ranks:
                told = ", ".join(map(self.name, ranks))
                warn(f"zero: on rank(s) {told}, {what}", rank=self.group.rank)

    def _check_launch(self, gone: str) -> None:
        if gone:
            raise CommunicationError(
                f"rank {self.name(self.group.rank)} ends, as {gone} has ended: nothing would end the ranks, "
                "start them again or save what they have trained. Start a new job from the last checkpoint; "
                "to train on in such a case, set Config(outlive_launcher=True)"
            )

    def postponing_disk_errors(self) -> AbstractContextManager[None]:
        """Postpone an OffloadError of the block to the next `agree`, so that no rank waits for this one.

        The block's result is then missing, and nothing computed until that `agree` may be kept.
        """
        return self._disk_errors

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

    def highest(self, what: str, numbers: Tensor, ranks: Group | None = None) -> Tensor:
        """Take the elementwise maximum of host integers over ranks (None: `group`), in place. Blocks the
        host."""
        if (ranks or self.group).size > 1:
            self._exchange(what, numbers, ranks)
        return numbers

    def start_or(self, what: str, flags: Tensor) -> NamedHandle:
        """Begin to take the elementwise "or" of host uint8 flags over the ranks, in place."""
        self._groups.line.failures.check()
        return self._start_exchange(what, flags)

    def check_equal(self, facts: Mapping[str, str], advice: Mapping[str, str] | None = None) -> None:
        """Raise RankMismatchError unless every rank of `group` passes the same text under every name.

        facts: the same names on all ranks. A text has a fact a line; the error shows the first that differs.
        advice: what to do, by name, where a fact differs that all ranks have.
        """
        if self.group.size == 1:
            return
        mine = [crc32(text.encode()) for text in facts.values()]
        _, equal = self._vote("settings and model", [], mine)
        unequal = [what for what, same in zip(facts, equal, strict=True) if not same]
        if unequal:
            every = self.all_gather_object(facts[unequal[0]].splitlines())
            shown = first_line(every, self.name)
            raise _disagreement(unequal, shown, None if shown.endswith(LACKS) else advice)

    def check_equal_along(
        self, dims: Collection[str], facts: Mapping[str, str], advice: Mapping[str, str] | None = None
    ) -> None:
        """Do as `check_equal` with the ranks of the job that differ in these dimensions of its mesh alone;
        all of the job must call this."""
        mine = [crc32(text.encode()) for text in facts.values()]
        every = self.everywhere(mine)
        for part in self.grid.parts(dims):
            unequal = [what for n, what in enumerate(facts) if len({every[rank][n] for rank in part}) > 1]
            if unequal:  # on all ranks alike
                lines = self.everywhere(facts[unequal[0]].splitlines())
                names = [self.grid.name(rank) for rank in part]
                shown = first_line([lines[rank] for rank in part], names.__getitem__)
                raise _disagreement(unequal, shown, advice)

    def on_any(self, what: str, flag: bool) -> bool:
        """Return whether any rank of the job passes `flag`, where it has others than `group`. Blocks the
        host."""
        if not self.divided:
            return flag
        return bool(self._exchange(what, torch.tensor([flag], dtype=torch.int64, device=HOST), self.whole))

    def on_any_alike(self, what: str, flag: bool) -> bool:
        """Return whether any rank whose model has the same structure passes `flag`. Blocks the host."""
        return bool(self.highest(what, torch.tensor([flag], dtype=torch.int64, device=HOST), self.alike))

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every rank's JSON value, by rank. Blocks the host."""
        return self._told(value, self._values) if self.group.size > 1 else _alone(value)

    def all_gather_alike(self, value: Any) -> list[Any]:
        """Return the JSON value of every rank whose model has the same structure. Blocks the host."""
        return self._told(value, self._alike) if self.alike.size > 1 else _alone(value)

    def everywhere(self, value: Any) -> list[Any]:
        """Return the JSON value of every rank of the job, by its number there. Blocks the host."""
        return self._told(value, self._everywhere) if self.whole.size > 1 else _alone(value)

    def _told(self, value: Any, exchange: Exchange) -> list[Any]:
        self.check()
        line = self._groups.line
        try:
            with line.waits.waiting(line.count, "exchange of values"):
                return exchange(value)
        except RuntimeError as error:
            raise CommunicationError(
                f"rank {self.name(self.group.rank)} did not get the other ranks' state: {error}. All ranks "
                "must make the same calls: look at the output of the others first"
            ) from error

    def _vote(
        self, what: str, flags: Sequence[bool], numbers: Sequence[int], ranks: Group | None = None
    ) -> tuple[list[bool], list[bool]]:
        """Return which flags any rank has set, and which numbers are the same on all ranks. ranks: None for
        `group`."""
        ballot = torch.tensor([*flags, *numbers, *(-n for n in numbers)], dtype=torch.int64, device=HOST)
        self._exchange(what, ballot, ranks)
        told, count = ballot.tolist(), len(flags)
        highest, lowest = told[count : count + len(numbers)], told[count + len(numbers) :]
        equal = [high == -low for high, low in zip(highest, lowest, strict=True)]
        return [bool(flag) for flag in told[:count]], equal

    def _exchange(self, what: str, tensor: Tensor, ranks: Group | None = None) -> Tensor:
        """All-reduce (max) in host memory, outside of the hashed sequence. ranks: None for `group`."""
        self.check()
        self._start_exchange(what, tensor, ranks).wait()
        return tensor

    def _start_exchange(self, what: str, tensor: Tensor, ranks: Group | None = None) -> NamedHandle:
        issued, ranks = self.ledger.exchange(what), ranks or self._control
        return self._start(issued, ranks, self._collectives.all_reduce, tensor, ranks, "max")

    def _enter(
        self, op: str, unit: str, numel: int, dtype: torch.dtype, ranks: Group, origin: str = ""
    ) -> Issued:
        """Enter a collective. numel: of the whole buffer, equal on all ranks."""
        self._groups.line.failures.check()
        if ranks is self.group:
            return self.ledger.collective(op, unit, numel, dtype, None, origin)
        self._others[id(ranks)] = ranks
        even = id(ranks) not in self._groups.uneven
        return self.ledger.collective(op, unit, numel, dtype, ranks.size, origin, even)

    def _start(self, issued: Issued, ranks: Group, call: Callable[..., Handle], *args: Any) -> NamedHandle:
        line = self._groups.line
        transfers = self.observation.transfers
        timed = transfers.begin(issued.op, issued.nbytes) if issued.nbytes else None
        wait = line.waits.begin(issued.number, issued.text)  # first uses of a size may wait for other ranks
        try:
            handle = call(*args, async_op=True)
        except CollectiveError as error:
            line.failures.explain(error, issued, ranks)
        except BaseException:
            line.waits.forget()
            issued.state = "failed"
            raise
        line.waits.over(wait)
        issued.state = "under way"
        mark = None
        if timed is not None:
            transfers.mark(timed)
            mark = partial(transfers.mark, timed)
        return NamedHandle(handle, issued, line, ranks, mark)


def _alone(value: Any) -> list[Any]:
    return [json.loads(json.dumps(value))]  # what other world sizes would see


def _disagreement(unequal: Sequence[str], shown: str, advice: Mapping[str, str] | None) -> RankMismatchError:
    told = (advice or {}).get(unequal[0], "")
    return RankMismatchError(
        f"the ranks disagree about {' and '.join(unequal)}, which must be the same on all ranks: "
        f"{shown}{f'. {told}' if told else ''}"
    )


def _transportable(tensor: Tensor) -> Tensor:
    """View dtypes that communication libraries may not know as bytes, which are only copied, never summed."""
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1:
        return tensor
    with torch.inference_mode(False):  # the collective may complete outside of it
        return tensor.view(torch.uint8)


_SETTINGS_ADVICE = (
    "Every rank steps its part of one model and must do so in the same way: if a scheduler follows a loss, "
    "as ReduceLROnPlateau does, give it the mean over the ranks"
)
