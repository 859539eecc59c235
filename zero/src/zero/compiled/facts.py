"""What graph passes know of the engine: facts about parameters and units, no tensors.

A *parameter number* is a parameter's place in `Facts.parameters`, a unit's *index* its place in
`Facts.units`. Graphs carry both as plain integers, with the engine's *handle*.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch

from zero.communication.quantised import Quantised
from zero.gradients.group_gradients import GradientPolicy
from zero.optimizer.record_streamer import RecordStreamer
from zero.sharding.sharded_unit import ShardedUnit
from zero.training_pass.training_pass import TrainingPass


@dataclass(frozen=True)
class UnitFacts:
    """What passes know of a unit.

    resident: whether it is always whole, and never gathered.
    elements: of the whole flat buffers, by dtype. rounded: those of them that travel in codes.
    away: whether shards are not on the device.
    streamed: bytes of optimizer state that come to the device for the step.
    slices: number that gradients are cut into once they are reduced, one of which stays on the device until
        the step; 0 if none does.
    """

    name: str
    resident: bool
    elements: dict[torch.dtype, int]
    away: bool = False
    streamed: int = 0
    slices: int = 0
    rounded: dict[torch.dtype, int] = field(default_factory=dict)

    def nbytes(self, travelling: torch.dtype) -> int:
        """Bytes of the gathered buffers if fp32 travels as `travelling`."""
        return _nbytes(self.elements, travelling)

    def nbytes_ahead(self, travelling: torch.dtype) -> int:
        """Bytes in use from the beginning of the gather until it is waited for."""
        return self.nbytes(travelling) - _nbytes(self.rounded, travelling) + self.nbytes_coded

    @property
    def nbytes_coded(self) -> int:
        """Bytes of codes and their scales."""
        return sum(map(Quantised.nbytes_of, self.rounded.values()))


def _nbytes(elements: dict[torch.dtype, int], travelling: torch.dtype) -> int:
    narrow = {torch.float32: travelling}
    return sum(n * narrow.get(dtype, dtype).itemsize for dtype, n in elements.items())


@dataclass(frozen=True)
class ParameterFacts:
    number: int
    name: str
    unit: int
    trainable: bool


@dataclass(frozen=True)
class Facts:
    """handle: of the engine's runtime, see `runtime.lookup`. scratch: bytes that a step takes besides state.
    passing: bytes of the state that is on the device only for its own step."""

    handle: int
    units: tuple[UnitFacts, ...]
    parameters: tuple[ParameterFacts, ...] = field(repr=False)
    scratch: int = 0
    passing: int = 0


def gather_facts(handle: int, training_pass: TrainingPass) -> Facts:
    """The facts about an engine. Parameters are numbered in the order of units, groups and slots."""
    parameters: list[ParameterFacts] = []
    units, streamed = training_pass.units, training_pass.streamed_state
    for unit in units:
        for group in unit.groups:
            for name in group.names:
                parameters.append(ParameterFacts(len(parameters), name, unit.index, group.trainable))
    of_units = tuple(_of_unit(unit, streamed, training_pass.reducer.policy) for unit in units)
    return Facts(handle, of_units, tuple(parameters), streamed.scratch, streamed.passing_bytes)


def _of_unit(unit: ShardedUnit, record_streamer: RecordStreamer, policy: GradientPolicy) -> UnitFacts:
    elements, rounded = Counter[torch.dtype](), Counter[torch.dtype]()
    for group in unit.groups:
        elements[group.dtype] += group.layout.numel
        if group.gather_options.quant_dtype is not None:
            rounded[group.dtype] += group.layout.numel
    near = any(group.placement.gradients.near for group in unit.groups if group.trainable)
    slices = 1 if policy.keeps_whole else unit.groups[0].shards if near else 0
    if policy.sums:
        slices = 0  # the last micro-batch finds them there
    return UnitFacts(
        unit.name, unit.resident, elements, unit.away, record_streamer.nbytes(unit), slices, rounded
    )
