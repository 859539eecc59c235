"""What graph passes know of the engine: facts about parameters and units, no tensors.

A *parameter number* is a parameter's place in `Facts.parameters`, a unit's *index* its place in
`Facts.units`. Graphs carry both as plain integers, with the engine's *handle*.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from zero.sharded_unit import ShardedUnit


@dataclass(frozen=True)
class UnitFacts:
    """resident: always whole, never gathered. elements: of the whole flat buffers, by dtype. away: whether
    shards are not on the device."""

    name: str
    resident: bool
    elements: dict[torch.dtype, int]
    away: bool = False

    def nbytes(self, travelling: torch.dtype) -> int:
        """Bytes of the gathered buffers where fp32 travels as `travelling`."""
        narrow = {torch.float32: travelling}
        return sum(n * narrow.get(dtype, dtype).itemsize for dtype, n in self.elements.items())


@dataclass(frozen=True)
class ParameterFacts:
    number: int
    name: str
    unit: int
    trainable: bool


@dataclass(frozen=True)
class Facts:
    """handle: of the engine's runtime, see `runtime.lookup`."""

    handle: int
    units: tuple[UnitFacts, ...]
    parameters: tuple[ParameterFacts, ...] = field(repr=False)


def gather_facts(handle: int, units: Sequence[ShardedUnit]) -> Facts:
    """Parameters are numbered in the order of units, groups and slots."""
    parameters: list[ParameterFacts] = []
    for unit in units:
        for group in unit.groups:
            for name in group.names:
                parameters.append(ParameterFacts(len(parameters), name, unit.index, group.trainable))
    return Facts(handle, tuple(_of_unit(unit) for unit in units), tuple(parameters))


def _of_unit(unit: ShardedUnit) -> UnitFacts:
    elements: dict[torch.dtype, int] = {}
    for group in unit.groups:
        elements[group.dtype] = elements.get(group.dtype, 0) + group.layout.numel
    return UnitFacts(unit.name, unit.resident, elements, unit.away)
