"""Follows the device's memory through a step, unit by unit."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from accelz.accelerator import Accelerator
from zero.gradients import GradientReducer
from zero.group_gradients import GroupGradients
from zero.optimizer import ShardedOptimizer
from zero.sharded_unit import ShardedUnit
from zero.tiers.trace import Held, MemoryReport, PhaseName, Sample


class MemoryTracer:
    """Samples while `steps` is not 0, and resets the device's peak. report: of the last whole step."""

    def __init__(
        self,
        accelerator: Accelerator,
        units: Sequence[ShardedUnit],
        reducer: GradientReducer,
        optimizer: ShardedOptimizer,
    ) -> None:
        self.steps = 0
        self.report: MemoryReport | None = None
        self._memory = accelerator.memory
        self._units = units
        self._reducer = reducer
        self._optimizer = optimizer
        self._begun = 0.0
        self._samples: list[Sample] = []
        self._leaving = 0  # gradients that have left, or will have when the optimizer begins

    def begin(self) -> None:
        """A step begins, with the first forward after the last one."""
        if self.steps and not self._samples:
            self._begun = time.perf_counter()
            self._memory.reset_peak()
            self.mark("forward", "")

    def mark(self, phase: PhaseName, unit: str) -> None:
        """A unit comes or goes."""
        if not self.steps:
            return
        stats = self._memory.stats()
        self._memory.reset_peak()
        seconds = time.perf_counter() - self._begun
        if phase != "step":  # at whose end there are none any more
            self._leaving = self._bits(lambda g: g.slice.present and g.group.placement.gradients != "device")
        away = self._leaving if phase == "step" else self._bits(lambda g: g.slice.away)
        self._samples.append(Sample(phase, unit, seconds, self.held(), stats.allocated, stats.peak, away))

    def _bits(self, is_set: Callable[[GroupGradients], bool]) -> int:
        return sum(is_set(gradients) << n for n, gradients in enumerate(self._reducer.all))

    def end(self) -> None:
        """The optimizer has stepped."""
        if self.steps:
            self.mark("step", "")
            self.report = MemoryReport(tuple(self._samples), self._memory.stats().capacity)
            self.steps -= 1
        self._samples.clear()

    def held(self) -> Held:
        """What the engine holds of the device now."""
        groups = sum((g.held() for unit in self._units for g in unit.groups), Held())
        beside = Held(gradients=self._reducer.device_bytes(), optimizer=self._optimizer.own_state_bytes())
        return groups + beside
