"""The names under which the ranks of a mesh store what they have, in one checkpoint of the whole job.

Parameters that differ by rank are stored each, under the model's name with the coordinates along which they
differ: `blocks.0.experts.up.weight[ep=1]`. Models that differ altogether, and parts of one, keep their own
names, unless several of them have the same one. DTensors keep theirs as well: what they are divided into are
blocks of one parameter, each in tensors whose keys have its coordinates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from torch import nn

from zero.communication.communicator import Communicator
from zero.communication.mesh import Meshes
from zero.sharding.distributed import divided_along
from zero.sharding.parts import own_name
from zero.sharding.sharded_unit import ShardedUnit
from zero.sharding.state_entries import entries_of


class StoredNames:
    """The stored names of one rank's model. Making one is collective, where models differ altogether."""

    def __init__(
        self, module: nn.Module, units: Iterable[ShardedUnit], communicator: Communicator, meshes: Meshes
    ) -> None:
        self._grid, self._rank = communicator.grid, communicator.whole.rank
        self._communicator = communicator
        self._coordinates = dict(zip(self._grid.names, self._grid.coordinates(self._rank), strict=True))
        entries, groups = entries_of(module), [group for unit in units for group in unit.groups]
        of_parameters = {parameter: group.mesh.apart for group in groups for parameter in group.parameters}
        self._apart: Mapping[str, frozenset[str]] = {
            **{name: meshes.apart_of(name) for name in entries.names},
            **{name: of_parameters[p] for name, p in entries.by_name.items() if p in of_parameters},
            **{name: group.mesh.apart for group in groups for name in group.names},
        }
        divided = {p: frozenset(divided_along(p) if self._grid.told else ()) for p in of_parameters}
        self._divided: Mapping[str, frozenset[str]] = {
            **{name: divided[p] for name, p in entries.by_name.items() if p in divided},
            **{n: divided[p] for g in groups for n, p in zip(g.names, g.parameters, strict=True)},
        }
        self._own = {name: own_name(module, name) for name in self._apart}
        self._several = {name for name, count in Counter(self._own.values()).items() if count > 1}
        if self._grid.stages:
            self._several |= self._in_several_stages()

    def stored(self, name: str) -> str:
        """The name under which a parameter, buffer or extra state of the model is stored."""
        apart = self._apart.get(name, frozenset()) - self._grid.stages - self._along(name)
        own = self._own.get(name, name)
        return name + self._at(apart | self._grid.stages) if own in self._several else own + self._at(apart)

    def block(self, name: str) -> str:
        """What follows the stored name in the keys of this rank's block of a parameter; "" if it has all."""
        return self._at(self._along(name))

    def has_first_block(self, name: str) -> bool:
        """Whether this rank's block of a parameter is the first, which stands for what blocks share."""
        return not any(self._coordinates[dim] for dim in self._along(name))

    def _along(self, name: str) -> frozenset[str]:
        """Dimensions along which ranks have other blocks of a parameter."""
        return self._divided.get(name, frozenset())

    def _at(self, dims: frozenset[str]) -> str:
        where = ",".join(f"{dim}={self._coordinates[dim]}" for dim in self._grid.names if dim in dims)
        return f"[{where}]" if where else ""

    def is_first(self, name: str) -> bool:
        """Whether this is the first of the ranks that have the same under this name, which describes it."""
        return self._first(self._apart.get(name, frozenset()))

    def elsewhere(self) -> frozenset[str]:
        """Stored names that other ranks have, and not this one. Collective, where there may be any."""
        if not self._grid.told or not any(self._communicator.everywhere(any(self._apart.values()))):
            return frozenset()
        mine = {self.stored(name) for name in self._apart}
        speaks = self._first(frozenset[str]().union(*self._apart.values()))  # none before has all the same
        every = self._communicator.everywhere(sorted(mine) if speaks else [])
        return frozenset(name for names in every for name in names) - mine

    def _first(self, apart: frozenset[str]) -> bool:
        return self._grid.part(self._rank, frozenset(self._grid.names) - apart)[0] == self._rank

    def _in_several_stages(self) -> set[str]:
        """Names that models of several stages have in their parts."""
        every = self._communicator.everywhere(sorted(self._own.values()))
        found: set[str] = set()
        for one in self._grid.parts(self._grid.alike):
            for other in self._grid.parts(self._grid.alike):
                if one < other:
                    found |= set(every[one[0]]) & set(every[other[0]])
        return found
