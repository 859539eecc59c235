"""Follows the device's memory through a step, unit by unit."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from accelz.accelerator import Accelerator
from zero.gradients.group_gradients import GroupGradients
from zero.gradients.reducer import GradientReducer
from zero.optimizer.sharded_optimizer import ShardedOptimizer
from zero.sharding.sharded_unit import ShardedUnit
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
        self._streams = accelerator.streams
        self._units = units
        self._reducer = reducer
        self._optimizer = optimizer
        self._begun = 0.0
        self._samples: list[Sample] = []
        self._away = 0  # gradients that have left
        self._before = 0  # that was in use, and not the engine's, before the forwards without a backward
        self._settled = True  # there is no such forward
        self._activations = 0

    def begin(self) -> None:
        """A forward begins; a step, with the first one after the last step."""
        if not self.steps:
            return
        if not self._samples:
            self._begun = time.perf_counter()
            self._forget_the_past()
        if self._settled:
            self._before = self._memory.stats().allocated - self.held().total
            self._settled = False
        self.mark("forward", "")

    def settle(self) -> None:
        """A backward is over: what its forwards have left is gone, but for what their caller holds."""
        self.mark("backward", "")
        self._settled = True

    def begin_step(self) -> None:
        """The optimizer begins: once what leaves has left, so that nothing is on its way in its samples."""
        if self.steps:
            self.mark("step", "")
            self._reducer.land()
            self._forget_the_past()
            self._away = self._bits(lambda g: g.slice.away)

    def mark(self, phase: PhaseName, unit: str) -> None:
        """A unit comes or goes, or has been stepped."""
        if not self.steps:
            return
        stats = self._memory.stats()
        self._memory.reset_peak()
        seconds = time.perf_counter() - self._begun
        if phase != "step":  # at whose end there are none any more
            self._away = self._bits(lambda g: g.slice.away)
        held = self.held()
        left = max(stats.allocated - held.total - self._before, 0)
        self._activations = min(left, self._activations) if phase == "step" else left
        self._samples.append(
            Sample(phase, unit, seconds, held, self._activations, stats.allocated, stats.peak, self._away)
        )

    def _forget_the_past(self) -> None:
        """A device may count what has gone until it has passed this point."""
        self._streams.synchronize()
        self._memory.reset_peak()

    def _bits(self, is_set: Callable[[GroupGradients], bool]) -> int:
        return sum(is_set(gradients) << n for n, gradients in enumerate(self._reducer.all))

    def end(self) -> None:
        """The optimizer has stepped."""
        if self.steps:
            self.mark("step", "")
            self._settled = True
            self.report = MemoryReport(tuple(self._samples), self._memory.stats().capacity)
            self.steps -= 1
        self._samples.clear()

    def held(self) -> Held:
        """What the engine holds of the device now."""
        groups = sum((g.held() for unit in self._units for g in unit.groups), Held())
        gradients = self._reducer.device_bytes() + self._optimizer.wide_bytes
        return groups + Held(gradients=gradients, optimizer=self._optimizer.own_state_bytes())
