"""Join the job's ranks, once per process; its engines share the groups."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, cast

from torch.distributed import DistStoreError

from accelz.accelerator import Accelerator
from accelz.collectives import Group
from accelz.errors import CollectiveError
from accelz.exchange import Exchange
from zero.communication.line import Line
from zero.errors import CommunicationError, ConfigError, RankMismatchError

T = TypeVar("T")


@dataclass(frozen=True)
class Split:
    """A rank's groups.

    shards: the ranks that share a copy of the model, with this one. replicas: the ranks that have the same
    slices, this one among them, one of each copy; None if there is one copy.
    """

    shards: Group
    replicas: Group | None


@dataclass
class JobGroups:
    """The job's groups for engines that have the same timeout.

    data, control: of all ranks; control is for host memory, and its messages do not interleave with data.
    splits: by the ranks of a copy of the model. line: what the engines issue, since the newest was made.
    """

    data: Group
    control: Group
    splits: dict[int, Split] = field(default_factory=dict)
    line: Line = field(init=False)


class _Job:
    """What this process knows of the job that it has joined.

    world: the group of all its ranks. same: where they compare what all must pass. groups: by timeout.
    engines: how many have been made.
    """

    def __init__(self, world: Group) -> None:
        self.process_group = world.process_group
        self.same = Exchange(world, "zero/joining")
        self.groups: dict[float, JobGroups] = {}
        self.engines = 0


_LONG = 0.9  # timeouts; libraries' own clocks may end a wait a little early

_job: _Job | None = None


def join(accelerator: Accelerator, timeout: float) -> JobGroups:
    """Join the job; return its groups.

    The job is given by torchrun's environment or an initialised default process group, and is otherwise one
    rank. Engines with the same timeout (seconds) use the same groups. Every rank must call this. Raises
    CommunicationError if some do not or the environment gives no place in a job, and RankMismatchError if
    timeouts differ.
    """
    accelerator.bind(_local_rank())

    def joined() -> JobGroups:
        global _job
        world = accelerator.collectives.init(timeout)
        if _job is None or _job.process_group is not world.process_group:
            _job = _Job(world)
        _check_same(_job, timeout)
        if timeout not in _job.groups:
            data, control = (_new_group(accelerator, None, timeout) for _ in range(2))
            _job.groups[timeout] = JobGroups(data, control)
        groups = _job.groups[timeout]
        _job.engines += 1
        groups.line = Line(groups.data, _job.engines)
        return groups

    return _explained(joined, timeout)


def _local_rank() -> int:
    text = os.environ.get("LOCAL_RANK", "").strip() or "0"
    if not text.isdecimal():
        raise CommunicationError(
            f"the environment has LOCAL_RANK={text}: it must be this process's number on its machine, from 0 "
            "on, as torchrun sets it"
        )
    return int(text)


def _check_same(job: _Job, timeout: float) -> None:
    """Raise RankMismatchError if ranks have different timeouts: they would look for different groups."""
    every = job.same(timeout, timeout)
    if len(set(every)) > 1:
        told = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(every))
        raise RankMismatchError(f"Config(timeout=...) must be the same on all ranks; it is {told}")


def split(accelerator: Accelerator, groups: JobGroups, shard_ranks: int | None) -> Split:
    """Divide the job into copies of the model of `shard_ranks` consecutive ranks each (None: one copy).

    Every rank must call this, with the same number. Raises what `ranks_of_replica` raises, and
    CommunicationError.
    """
    group = groups.data
    each = ranks_of_replica(shard_ranks, group.size)
    if each == group.size:
        return Split(group, None)
    if each not in groups.splits:
        groups.splits[each] = _explained(lambda: _cut(accelerator, group, each), group.timeout)
    return groups.splits[each]


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


def _cut(accelerator: Accelerator, group: Group, each: int) -> Split:
    ranks = range(group.size)
    shards = [_new_group(accelerator, ranks[start : start + each], group.timeout) for start in ranks[::each]]
    copies = [_new_group(accelerator, ranks[place::each], group.timeout) for place in range(each)]
    return Split(shards[group.rank // each], copies[group.rank % each])


def _new_group(accelerator: Accelerator, ranks: Sequence[int] | None, timeout: float) -> Group:
    """Make a group of these ranks. All ranks of the job must call this; only these ranks may use it."""
    return cast(Group, accelerator.collectives.new_group(ranks, timeout))


def _explained(call: Callable[[], T], timeout: float) -> T:
    """Call, and raise CommunicationError for what fails: the other ranks are suspected after a long wait."""
    began = time.monotonic()
    try:
        return call()
    except (CollectiveError, DistStoreError) as error:
        if time.monotonic() - began < _LONG * timeout:
            raise CommunicationError(f"this rank could not join the job: {error}") from error
        raise CommunicationError(
            f"not all ranks joined the job within {timeout:.0f} s; look for one that exited early. Error on "
            f"this rank: {error}"
        ) from error
