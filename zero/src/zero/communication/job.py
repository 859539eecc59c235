"""Join the job's ranks, once per process; its engines share the groups."""

from __future__ import annotations

import json
import os
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar, cast
from weakref import WeakKeyDictionary
from zlib import crc32

import torch
import torch.distributed
from torch.distributed import DistStoreError, ProcessGroup

from accelz import Accelerator, CollectiveError, Group
from accelz.ranks.bounded_store import HostSilentError
from accelz.ranks.exchange import Exchange
from accelz.ranks.peers import Peers, card
from zero.communication.grid import Grid
from zero.communication.launch import Launch
from zero.communication.line import Line
from zero.config.paths import as_path
from zero.errors import CommunicationError, RankMismatchError
from zero.observe.flight_file import Issuing
from zero.observe.flight_recorder import FlightRecorder, known_recorder, recorder_of

T = TypeVar("T")
Parts = tuple[tuple[int, ...], ...]
"""Sets of rank numbers that a job is divided into."""


@dataclass(frozen=True)
class Arranged:
    """A job as the program arranges it. ranks: numbers among all ranks that were started, ascending."""

    ranks: tuple[int, ...]
    grid: Grid

    def along(self, dims: Collection[str]) -> frozenset[int]:
        """The ranks that differ from this process in these dimensions alone, and this one."""
        number = self.ranks.index(torch.distributed.get_rank())
        return frozenset(self.ranks[each] for each in self.grid.part(number, dims))


@dataclass
class JobGroups:
    """The groups of a job's engines that have the same timeout and divide their data alike.

    grid: how the job's ranks are arranged. whole: of all ranks of the job. data, control: of the ranks that
    have different data, which are all of them where the job's mesh has no other dimensions; control is for
    host memory, and its messages do not interleave with data. ranks: their numbers in the job. parts: other
    groups, by the sets that they divide the job into. uneven: ids of groups whose collectives may have
    another size on ranks that are not in them. line: what the engines issue, since the newest was made.
    """

    job: Job
    grid: Grid
    whole: Group
    data: Group
    control: Group
    ranks: tuple[int, ...]
    parts: dict[Parts, Group] = field(default_factory=dict)
    uneven: set[int] = field(default_factory=set)
    line: Line = field(init=False)
    recorder: FlightRecorder | None = None

    def new_line(self) -> None:
        """Begin a line for a new engine."""
        self.line = Line(self.whole, self.job.engines, self.ranks, self.grid.name)
        self.line.failures.recorder = self.recorder
        if self.recorder is not None:
            self.recorder.rearm()

    def tell(self, recorder: FlightRecorder) -> None:
        """Have a recorder write what is issued, with numbers among all ranks that were started."""
        if self.recorder is None:
            self.recorder = self.line.failures.recorder = recorder
            groups = weakref.ref(self)
            recorder.lines.append(lambda: None if (alive := groups()) is None else alive._issuing())

    def _issuing(self) -> Issuing:
        alike = self.job.started(self.ranks)
        return Issuing(self.line.key, alike, tuple(each.described() for each in tuple(self.line.issued)))

    def part(self, parts: Parts) -> Group:
        """This rank's group of those that `parts` divide the job into. All ranks must call this the first
        time. Raises CommunicationError."""
        if len(parts) == 1:
            return self.whole
        if self.ranks in parts:
            return self.data
        if parts not in self.parts:
            job, timeout = self.job, self.whole.timeout
            self.parts[parts] = explained(lambda: job.connect(job.part(parts, timeout)), timeout)
        return self.parts[parts]


class Job:
    """The ranks that train together: all that were started, or those of one process group.

    ranks: their numbers among all that were started, ascending. whole: whether these are all; otherwise the
    others need not make any calls. peers: the ranks' processes. groups: by timeout and arrangement.
    engines: how many have been made. launch: the processes that hold the ranks together.
    """

    def __init__(self, accelerator: Accelerator, members: Group, ranks: Sequence[int], whole: bool) -> None:
        self.groups: dict[tuple[float, Grid], JobGroups] = {}
        self.engines = 0
        self._accelerator = accelerator
        self._ranks = ranks
        self._whole = whole
        self._rank = members.rank
        self.peers = Peers()
        self.launch = Launch(members)
        self._exchange = Exchange(members, "zero/joining")

    def meet(self, timeout: float, grid: Grid | None) -> None:
        """Wait for all ranks, for at most `timeout` seconds. grid: as the program has given it.

        Raises RankMismatchError if their timeouts or meshes differ, as they would look for different groups.
        """
        arranged = grid and [
            *zip(grid.names, grid.sizes, strict=True),
            *map(sorted, (grid.data, grid.shards, grid.stages)),
        ]
        ranks = crc32(repr(grid and grid.ranks).encode())  # thousands of numbers, perhaps
        said = self._exchange([timeout, json.dumps([arranged, ranks]), card()], timeout)
        every, meshes, cards = zip(*said, strict=True)
        self.peers = self._exchange.peers = Peers(cards)
        if len(set(every)) > 1:
            told = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(every))
            raise RankMismatchError(f"Config(timeout=...) must be the same on all ranks; it is {told}")
        if len(set(meshes)) > 1:
            rank = next(rank for rank, mesh in enumerate(meshes) if mesh != meshes[0])
            raise RankMismatchError(
                "mesh, data_dims, shard_dims and the dimensions of '*' in local_modules must be the same on "
                "all ranks that call zero.initialize together; names, sizes, these dimensions and a checksum "
                f"of the ranks are {meshes[0]} on rank 0, {meshes[rank]} on rank {rank}"
            )

    def part(self, parts: Sequence[Sequence[int]], timeout: float) -> Group:
        """Divide the job into groups; return this rank's. All of its ranks must call this."""
        collectives = self._accelerator.collectives
        named = [[self._ranks[rank] for rank in part] for part in parts]
        if self._whole:
            made = [collectives.new_group(ranks, timeout) for ranks in named]
            return next(group for group in made if group is not None)
        mine = next(ranks for ranks in named if self._ranks[self._rank] in ranks)
        return cast(Group, collectives.new_group(mine, timeout, members_only=True))

    def started(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """The numbers of the job's ranks among all that were started."""
        return tuple(self._ranks[rank] for rank in ranks)

    def connect(self, group: Group) -> Group:
        """Connect a group for device tensors while its ranks are known to be there."""
        if group.size > 1:
            self._accelerator.collectives.connect(group, self._accelerator.device)
            self._accelerator.streams.synchronize()
            self._accelerator.collectives.check(group)
        return group


FLIGHTS = "ZERO_FLIGHT_RECORDER"
"""The variable that names a folder for flights, see `FlightRecorder`."""
_LONG = 0.9  # timeouts; libraries' own clocks may end a wait a little early


def record_flight(folder: Path) -> None:
    """Have the process's recorder write what all its engines issue, those to come among them. Raises what
    `recorder_of` raises."""
    recorder = recorder_of(folder, torch.distributed.get_rank(), torch.distributed.get_world_size())
    for job in list(_jobs.values()):
        for groups in job.groups.values():
            groups.tell(recorder)
    recorder.rearm()


_jobs: WeakKeyDictionary[ProcessGroup, Job] = WeakKeyDictionary()
_groups: WeakKeyDictionary[ProcessGroup, dict[tuple[int, ...], Group]] = WeakKeyDictionary()
"""By default group and ranks: groups of meshes that have some of the ranks."""


def join(
    accelerator: Accelerator,
    timeout: float,
    process_group: ProcessGroup | None = None,
    arranged: Arranged | None = None,
) -> JobGroups:
    """Join the job; return the groups for a new engine.

    process_group, arranged: their ranks are the job. By default that is given by torchrun's environment or an
    initialised default process group, and is otherwise one rank. Engines with the same timeout (seconds) and
    arrangement use the same groups. Every rank of the job must call this. Raises CommunicationError if some
    do not or the environment gives no place in a job, and RankMismatchError if timeouts or arrangements
    differ.
    """
    accelerator.bind(_local_rank())
    return explained(lambda: _join(accelerator, timeout, process_group, arranged), timeout)


def _join(
    accelerator: Accelerator,
    timeout: float,
    process_group: ProcessGroup | None,
    arranged: Arranged | None,
) -> JobGroups:
    world = accelerator.collectives.init(timeout)
    members = world if process_group is None else Group.of(process_group, timeout)
    if arranged is not None:
        members = _of_ranks(accelerator, world, arranged.ranks)
    if members.process_group not in _jobs:
        ranks = torch.distributed.get_process_group_ranks(members.process_group)
        _jobs[members.process_group] = Job(accelerator, members, ranks, whole=members.size == world.size)
    job, given = _jobs[members.process_group], None if arranged is None else arranged.grid
    job.meet(timeout, given)
    grid = given or Grid.plain(members.size)
    if (timeout, grid) not in job.groups:
        job.groups[timeout, grid] = _new_groups(job, grid, members, timeout)
    groups = job.groups[timeout, grid]
    job.engines += 1
    groups.new_line()
    if folder := os.environ.get(FLIGHTS):
        record_flight(as_path(folder).absolute())
    elif (recorder := known_recorder()) is not None:
        record_flight(recorder.folder)
    return groups


def _of_ranks(accelerator: Accelerator, world: Group, ranks: tuple[int, ...]) -> Group:
    """A group of some ranks, numbered among all that were started, which call this."""
    if len(ranks) == world.size:
        return world
    made = _groups.setdefault(world.process_group, {})
    if ranks not in made:
        group = accelerator.collectives.new_group(ranks, world.timeout, members_only=True)
        made[ranks] = cast(Group, group)
    return made[ranks]


def _new_groups(job: Job, grid: Grid, members: Group, timeout: float) -> JobGroups:
    parts, whole = grid.parts(grid.data), job.connect(job.part([range(members.size)], timeout))
    data = whole if len(parts) == 1 else job.connect(job.part(parts, timeout))
    return JobGroups(job, grid, whole, data, job.part(parts, timeout), grid.part(members.rank, grid.data))


def _local_rank() -> int:
    text = os.environ.get("LOCAL_RANK", "").strip() or "0"
    if not text.isdecimal():
        raise CommunicationError(
            f"the environment has LOCAL_RANK={text}: it must be this process's number on its machine, from 0 "
            "on, as torchrun sets it"
        )
    return int(text)


def explained(call: Callable[[], T], timeout: float) -> T:
    """Call, and raise CommunicationError for what fails while ranks join the job: the others are suspected
    after a long wait, unless the store's host is silent."""
    began = time.monotonic()
    try:
        return call()
    except (CollectiveError, DistStoreError) as error:
        silent = isinstance(error, HostSilentError) or isinstance(error.__cause__, HostSilentError)
        if time.monotonic() - began < _LONG * timeout or silent:
            raise CommunicationError(f"this rank could not join the job: {error}") from error
        raise CommunicationError(
            f"not all ranks joined the job within {timeout:.0f} s; look for one that exited early. Error on "
            f"this rank: {error}"
        ) from error
