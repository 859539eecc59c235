"""The ranks that parameters are spread over. Groups of parameters in one engine may differ in them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from accelz import Group
from zero.communication.grid import Grid
from zero.communication.job import JobGroups


@dataclass(frozen=True, eq=False)
class Mesh:
    """The ranks that parameters are spread over, as one of them sees it.

    shards: the ranks that share a copy of the parameters, with this one. replicas: the ranks that have the
    same slices, this one among them, one of each copy; None if there is one copy. data: all these ranks,
    whose gradients are summed and whose rank 0 gives the first values. beyond: the ranks with this rank's
    data and the same values, in dimensions of the job's mesh that have no data; None if there are none.

    members: the numbers of `data` among the engine's ranks. places: for each of the engine's ranks, its
    number in the `data` that it is in itself, which may be another for parameters that differ by rank.
    apart: dimensions of the job's mesh along which other ranks have other values in the parameters' place.
    """

    shards: Group
    replicas: Group | None
    data: Group
    beyond: Group | None
    members: tuple[int, ...]
    places: tuple[int, ...]
    apart: frozenset[str]

    @property
    def is_first(self) -> bool:
        """Whether `Communicator.spread` spreads this rank's values, where it starts at rank 0."""
        return self.data.rank == 0 and (self.beyond is None or self.beyond.rank == 0)

    @property
    def is_first_copy(self) -> bool:
        """Whether this rank shares the first copy of the parameters; the others have the same values."""
        return all(copies is None or copies.rank == 0 for copies in (self.replicas, self.beyond))

    def times(self, sliced: bool) -> int:
        """How many ranks of the job have what this rank has. sliced: whether `shards` have slices."""
        having = (None if sliced else self.shards, self.replicas, self.beyond)
        return math.prod(group.size for group in having if group is not None)


class Meshes:
    """The meshes of one engine, made when they are asked for. All ranks must ask for the same.

    apart_of: the dimensions along which a buffer differs, by its name.
    """

    def __init__(
        self,
        groups: JobGroups,
        grid: Grid,
        apart_of: Callable[[str], frozenset[str]] = lambda name: frozenset(),
    ) -> None:
        self._groups = groups
        self._grid = grid
        self.apart_of = apart_of
        self._made: dict[frozenset[str], Mesh] = {}

    def of(self, apart: Collection[str] = ()) -> Mesh:
        """The mesh of parameters that differ along the dimensions `apart`. Collective the first time."""
        key = frozenset(apart)
        if key not in self._made:
            self._made[key] = self._make(key)
        return self._made[key]

    def make(self, everywhere: Callable[[Any], list[Any]], apart: Iterable[frozenset[str]]) -> None:
        """Make the meshes that any rank needs, and the one of parameters that do not differ. Collective.

        everywhere: gathers a JSON value of every rank of the job. apart: what this rank needs.
        """
        self.of()
        self.of(self._grid.stages)
        if self._grid.told:
            mine = sorted({tuple(sorted(dims)) for dims in apart if dims})
            for dims in sorted({tuple(dims) for each in everywhere(mine) for dims in each}):
                self.of(dims)

    def of_buffer(self, name: str) -> Mesh:
        """The mesh of a module's buffer, by its name."""
        return self.of(self.apart_of(name))

    def of_extra_state(self, name: str) -> frozenset[str]:
        """Along which dimensions an entry of a state dict differs that is no parameter or buffer; `of` has
        their mesh already."""
        apart = self.apart_of(name)
        return apart if apart in self._made else self._grid.stages

    def is_source(self) -> bool:
        """Whether this rank reads and writes state for all that have the same parameters: the first of those
        from which none of this engine's parameters differ."""
        apart, rank = frozenset[str]().union(*self._made), self._groups.whole.rank
        return self._grid.part(rank, self._grid.data - apart)[0] == rank

    def _make(self, apart: frozenset[str]) -> Mesh:
        grid, groups = self._grid, self._groups
        data, shards, beyond = grid.data - apart, grid.shards - apart, grid.others - apart
        replicas = data - shards
        if apart & grid.data:
            divided = [dims for dims in (shards, replicas, data, beyond) if grid.size(dims) > 1]
            groups.uneven |= {id(groups.part(grid.parts(dims))) for dims in divided}
        number = {rank: n for part in grid.parts(data) for n, rank in enumerate(part)}
        numbers = {rank: n for n, rank in enumerate(groups.ranks)}
        return Mesh(
            shards=groups.part(grid.parts(shards)),
            replicas=groups.part(grid.parts(replicas)) if grid.size(replicas) > 1 else None,
            data=groups.part(grid.parts(data)),
            beyond=groups.part(grid.parts(beyond)) if grid.size(beyond) > 1 else None,
            members=tuple(numbers[rank] for rank in grid.part(groups.whole.rank, data)),
            places=tuple(number[rank] for rank in groups.ranks),
            apart=apart,
        )
