"""How the ranks of a job are arranged along the dimensions of a mesh. Arithmetic only, no groups."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from zero.errors import ConfigError

DATA = "data"
_COPIES = "copies"


@dataclass(frozen=True)
class Grid:
    """The ranks of a job by their coordinates.

    names, sizes: of the dimensions. ranks: the rank at each place, the last dimension running fastest, of
    0 to n - 1. data: dimensions along which ranks have different data: the gradients of ranks that differ in
    these alone are summed. shards: those of them that parameters are sharded over; along the others of them
    there are copies. stages: other dimensions along which whole models differ, as in a pipeline. told:
    whether the program has named the dimensions, so that messages can say coordinates.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    ranks: tuple[int, ...]
    data: frozenset[str]
    shards: frozenset[str]
    stages: frozenset[str] = frozenset()
    told: bool = True

    @classmethod
    def plain(cls, ranks: int, shard_ranks: int | None = None) -> Grid:
        """Ranks that all have different data; `shard_ranks` consecutive ones share a copy (None: all).

        Raises what `ranks_of_replica` raises.
        """
        each = ranks_of_replica(shard_ranks, ranks)
        sizes = (ranks // each, each)
        both, shards = frozenset((_COPIES, DATA)), frozenset((DATA,))
        return cls((_COPIES, DATA), sizes, tuple(range(ranks)), both, shards, told=False)

    @property
    def others(self) -> frozenset[str]:
        """Dimensions along which ranks have the same data, or parts of one model."""
        return frozenset(self.names) - self.data

    @property
    def alike(self) -> frozenset[str]:
        """Dimensions along which models have the same structure."""
        return frozenset(self.names) - self.stages

    def size(self, along: Collection[str]) -> int:
        """How many ranks differ in these dimensions alone."""
        return math.prod(n for name, n in zip(self.names, self.sizes, strict=True) if name in along)

    def parts(self, along: Collection[str]) -> tuple[tuple[int, ...], ...]:
        """The ranks in sets that differ in these dimensions alone, each ascending."""
        return _parts(self, frozenset(along))

    def part(self, rank: int, along: Collection[str]) -> tuple[int, ...]:
        """The set of `parts` that a rank is in."""
        return _part_of(self, frozenset(along))[rank]

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """A rank's coordinate in each dimension."""
        return _coordinates(self)[rank]

    def name(self, rank: int) -> str:
        """A rank for messages: its number, and its coordinates where the program has named dimensions."""
        if not self.told:
            return str(rank)
        where = zip(self.names, self.coordinates(rank), strict=True)
        return f"{rank} ({', '.join(f'{name} {place}' for name, place in where)})"


@lru_cache(maxsize=256)
def _coordinates(grid: Grid) -> dict[int, tuple[int, ...]]:
    return dict(zip(grid.ranks, product(*map(range, grid.sizes)), strict=True))


@lru_cache(maxsize=256)
def _parts(grid: Grid, along: frozenset[str]) -> tuple[tuple[int, ...], ...]:
    others = [dim for dim, name in enumerate(grid.names) if name not in along]
    found: dict[tuple[int, ...], list[int]] = {}
    for rank, place in _coordinates(grid).items():
        found.setdefault(tuple(place[dim] for dim in others), []).append(rank)
    return tuple(sorted(tuple(sorted(part)) for part in found.values()))


@lru_cache(maxsize=256)
def _part_of(grid: Grid, along: frozenset[str]) -> dict[int, tuple[int, ...]]:
    return {rank: part for part in _parts(grid, along) for rank in part}


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
