"""Which ranks of a group share a host, as all of them find out together through the group's store."""

from __future__ import annotations

import json
from dataclasses import dataclass

from accelz import Group
from accelz.ranks.exchange import Exchange
from accelz.ranks.machine import machine


@dataclass(frozen=True)
class Hosts:
    """The hosts of a group, as one of its ranks sees them.

    ranks: the group's ranks by host, ascending; hosts in the order of their first ranks. index: this rank's
    host. place: this rank's place among the ranks of its host.
    """

    ranks: tuple[tuple[int, ...], ...]
    index: int
    place: int

    @property
    def here(self) -> tuple[int, ...]:
        """The ranks on this rank's host."""
        return self.ranks[self.index]

    @property
    def even(self) -> bool:
        """Whether all hosts have the same number of ranks."""
        return len({len(ranks) for ranks in self.ranks}) == 1

    @property
    def order(self) -> list[int]:
        """All ranks, host by host."""
        return [rank for ranks in self.ranks for rank in ranks]

    def locate(self, rank: int) -> tuple[int, int]:
        """Return the host of a rank, and the rank's place there."""
        index = next(i for i, ranks in enumerate(self.ranks) if rank in ranks)
        return index, self.ranks[index].index(rank)


def find_hosts(group: Group, exchange: Exchange) -> Hosts:
    """Find the hosts of the group's ranks. Every rank of the group must call this. exchange: of the group."""
    names = [json.dumps(name) for name in exchange(machine())]
    by_host: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        by_host.setdefault(name, []).append(rank)
    index, place = list(by_host).index(names[group.rank]), by_host[names[group.rank]].index(group.rank)
    return Hosts(tuple(map(tuple, by_host.values())), index, place)
