"""Ranks that communicate with each other."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from accelz.ranks.bounded_store import BoundedStore, default_store


@dataclass(frozen=True)
class Group:
    """Ranks that communicate with each other.

    rank: this process's rank in the group. size: the number of ranks. store: a key-value store that all of
    them can reach, for control data; it works even while a collective hangs, and its host may be silent for
    `timeout`. timeout: seconds after which a collective fails.
    """

    rank: int
    size: int
    timeout: float
    store: BoundedStore
    process_group: dist.ProcessGroup

    @classmethod
    def of(cls, process_group: dist.ProcessGroup, timeout: float) -> Group:
        """A process group of torch.distributed, which this rank is in."""
        return cls(process_group.rank(), process_group.size(), timeout, default_store(timeout), process_group)
