"""Join the job's ranks, once per process; its engines share the groups."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed
from torch.distributed import DistStoreError, ProcessGroup

from accelz import Accelerator, CollectiveError, Group
from accelz.ranks.bounded_store import HostSilentError
from accelz.ranks.exchange import Exchange
from accelz.ranks.peers import Peers, card
from zero.communication.launch import Launch
from zero.communication.line import Line
from zero.errors import CommunicationError, ConfigError, RankMismatchError

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Mesh:
    """The ranks that parameters are spread over, as one of them sees it.

    shards: the ranks that share a copy of the parameters, with this one. replicas: the ranks that have the
    same slices, this one among them, one of each copy; None if there is one copy.
    """

    shards: Group
    replicas: Group | None = None

    @property
    def is_first_copy(self) -> bool:
        """Whether this rank shares the first copy of the parameters; the others have the same values."""
        return self.replicas is None or self.replicas.rank == 0


@dataclass
class JobGroups:
    """The groups of a job's engines that have the same timeout.

    data, control: of all ranks; control is for host memory, and its messages do not interleave with data.
    meshes: by the number of ranks that share a copy. line: what the engines issue, since the newest was made.
    """

    job: Job
    data: Group
    control: Group
    meshes: dict[int, Mesh] = field(default_factory=dict)
    line: Line = field(init=False)


class Job:
    """The ranks that train together: all that were started, or those of one process group.

    ranks: their numbers among all that were started, ascending. whole: whether these are all; otherwise the
    others need not make any calls. peers: the ranks' processes. groups: by timeout. engines: how many have
    been made. launch: the processes that hold the ranks together.
    """

    def __init__(self, accelerator: Accelerator, members: Group, ranks: Sequence[int], whole: bool) -> None:
        self.groups: dict[float, JobGroups] = {}
        self.engines = 0
        self._accelerator = accelerator
        self._ranks = ranks
        self._whole = whole
        self._rank = members.rank
        self.peers = Peers()
        self.launch = Launch(members)
        self._exchange = Exchange(members, "zero/joining")

    def meet(self, timeout: float) -> None:
        """Wait for all ranks, for at most `timeout` seconds.

        Raises RankMismatchError if their timeouts differ, as they would look for different groups.
        """
        every, cards = zip(*self._exchange([timeout, card()], timeout), strict=True)
        self.peers = self._exchange.peers = Peers(cards)
        if len(set(every)) > 1:
            told = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(every))
            raise RankMismatchError(f"Config(timeout=...) must be the same on all ranks; it is {told}")

    def new_group(self, timeout: float) -> Group:
        """Make another group of all the job's ranks, which must all call this."""
        return self.part([range(len(self._ranks))], timeout)

    def part(self, parts: Sequence[Sequence[int]], timeout: float) -> Group:
        """Divide the job into groups; return this rank's. All of its ranks must call this."""
        collectives = self._accelerator.collectives
        named = [[self._ranks[rank] for rank in part] for part in parts]
        if self._whole:
            made = [collectives.new_group(ranks, timeout) for ranks in named]
            return next(group for group in made if group is not None)
        mine = next(ranks for ranks in named if self._ranks[self._rank] in ranks)
        return cast(Group, collectives.new_group(mine, timeout, members_only=True))

    def connect(self, group: Group) -> Group:
        """Connect a group for device tensors while its ranks are known to be there."""
        if group.size > 1:
            self._accelerator.collectives.connect(group, self._accelerator.device)
            self._accelerator.streams.synchronize()
            self._accelerator.collectives.check(group)
        return group


_LONG = 0.9  # timeouts; libraries' own clocks may end a wait a little early

_jobs: WeakKeyDictionary[ProcessGroup, Job] = WeakKeyDictionary()


def join(accelerator: Accelerator, timeout: float, process_group: ProcessGroup | None = None) -> JobGroups:
    """Join the job; return the groups for a new engine.

    process_group: its ranks are the job. By default that is given by torchrun's environment or an initialised
    default process group, and is otherwise one rank. Engines with the same timeout (seconds) use the same
    groups. Every rank of the job must call this. Raises CommunicationError if some do not or the environment
    gives no place in a job, and RankMismatchError if timeouts differ.
    """
    accelerator.bind(_local_rank())
    return explained(lambda: _join(accelerator, timeout, process_group), timeout)


def _join(accelerator: Accelerator, timeout: float, process_group: ProcessGroup | None) -> JobGroups:
    world = accelerator.collectives.init(timeout)
    members = world if process_group is None else Group.of(process_group, timeout)
    if members.process_group not in _jobs:
        ranks = torch.distributed.get_process_group_ranks(members.process_group)
        _jobs[members.process_group] = Job(accelerator, members, ranks, whole=members.size == world.size)
    job = _jobs[members.process_group]
    job.meet(timeout)
    if timeout not in job.groups:
        data, control = job.connect(job.new_group(timeout)), job.new_group(timeout)
        job.groups[timeout] = JobGroups(job, data, control)
    groups = job.groups[timeout]
    job.engines += 1
    groups.line = Line(groups.data, job.engines)
    return groups


def _local_rank() -> int:
    text = os.environ.get("LOCAL_RANK", "").strip() or "0"
    if not text.isdecimal():
        raise CommunicationError(
            f"the environment has LOCAL_RANK={text}: it must be this process's number on its machine, from 0 "
            "on, as torchrun sets it"
        )
    return int(text)


def mesh_of(groups: JobGroups, shard_ranks: int | None) -> Mesh:
    """Divide the job into copies of the parameters on `shard_ranks` consecutive ranks each (None: one copy).

    Every rank must call this, with the same number. Raises what `ranks_of_replica` raises, and
    CommunicationError.
    """
    group = groups.data
    each = ranks_of_replica(shard_ranks, group.size)
    if each == group.size:
        return Mesh(group)
    if each not in groups.meshes:
        groups.meshes[each] = explained(lambda: _cut(groups.job, group, each), group.timeout)
    return groups.meshes[each]


def ranks_of_replica(shard_ranks: int | None, ranks: int) -> int:
    """Return how many of the job's `ranks` share a copy.

    Raises ConfigError if copies would have different numbers of ranks.
    """
    each = ranks if shard_ranks is None else min(shard_ranks, ranks)
    if ranks % each:
        raise ConfigError(
            f"shard_ranks={each} does not divide the job's {ranks} ranks: every copy of the model needs the "
            "same number of ranks"
        )
    return each


def _cut(job: Job, group: Group, each: int) -> Mesh:
    ranks = range(group.size)
    shards = job.part([ranks[start : start + each] for start in ranks[::each]], group.timeout)
    replicas = job.part([ranks[place::each] for place in range(each)], group.timeout)
    return Mesh(job.connect(shards), job.connect(replicas))


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
