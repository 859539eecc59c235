"""Follows the device's memory through a step, unit by unit."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from accelz import Accelerator
from zero.config.sizes import human
from zero.gradients.group_gradients import GroupGradients
from zero.gradients.reducer import GradientReducer
from zero.memory.memory_report import MemoryReport, Sample
from zero.observe.observation import Observation
from zero.optimizer.sharded_optimizer import ShardedOptimizer
from zero.sharding.sharded_unit import ShardedUnit
from zero.tiers.device_bytes import DeviceBytes, PhaseName

LOOK_EVERY = 1.0
"""Seconds, at least."""
LOOK_SHARE = 1000
"""The least time between looks, in times of what one takes."""
_ENTRIES = 100_000  # allocations and frees that are kept, with the lines of the program that led to them


class MemoryTracer:
    """Samples whole steps while `steps` is not 0, and resets the device's peak. report: of the last step
    sampled. wants_history: whether reports are to have torch's record of allocations.

    A step begins with its first forward that is to be differentiated. It is followed from there or not at
    all; what has come before that, such as an evaluation, is not part of it.
    """

    def __init__(self, accelerator: Accelerator, units: Sequence[ShardedUnit]) -> None:
        self.steps = 0
        self.wants_history = False
        self.report: MemoryReport | None = None
        self._untold: MemoryReport | None = None  # until observers have been told
        self._memory = accelerator.memory
        self._exact = accelerator.capabilities.exact_memory
        self._history = MemoryHistory(accelerator.device)
        self._streams = accelerator.streams
        self._units = units
        self._reducer: Callable[[], GradientReducer | None] = lambda: None  # weak, like the next
        self._optimizer: Callable[[], ShardedOptimizer | None] = lambda: None
        self._begun = 0.0
        self._next_look = 0.0
        self._now: dict[str, int] = {}
        self._samples: list[Sample] = []
        self._away = 0  # gradients that have left
        self._before = 0  # bytes in use that were not the engine's, before the forwards without a backward
        self._no_pending_forward = True  # there is no such forward
        self._activations = 0
        self._fresh = True  # the step has not begun
        self._follows = False  # the step is followed

    def follow(self, reducer: GradientReducer, optimizer: ShardedOptimizer) -> None:
        """Count what these hold, too, from now on. They are made later than the tracer, which they call."""
        self._reducer, self._optimizer = weakref.ref(reducer), weakref.ref(optimizer)

    def begin(self) -> None:
        """A forward of the whole model begins."""
        self._begin_step()
        if self._follows and self._no_pending_forward:
            self._note_before()
            self._no_pending_forward = False
        self.mark("forward", "")

    def _begin_step(self) -> None:
        if not (self._fresh and torch.is_grad_enabled()):
            return
        self._fresh, self._follows = False, self.steps > 0
        if self._follows:
            self._begun = time.perf_counter()
            self._streams.synchronize()  # a device may count what has gone until it has passed this point
            self._memory.reset_peak()
            self._note_before()
            if self.wants_history:
                self._history.begin()

    def _note_before(self) -> None:
        self._before = self._memory.stats().allocated - self.held().total

    def end_backward(self) -> None:
        """A backward is over: what its forwards have left is gone, except for what their caller holds."""
        self.mark("backward", "")
        self._no_pending_forward = True

    def begin_update(self) -> None:
        """The optimizer begins."""
        self.mark("step", "")
        if self._follows:
            self._away = self._bits(lambda g: g.slice.away)

    def mark(self, phase: PhaseName, unit: str) -> None:
        """A unit comes or goes, or has been stepped."""
        if phase == "forward":
            self._begin_step()  # for a model whose parts are called by themselves
        if not self._follows:
            return
        stats = self._memory.stats()
        self._memory.reset_peak()
        seconds = time.perf_counter() - self._begun
        if phase != "step":  # at the end of which there are none
            self._away = self._bits(lambda g: g.slice.away)
        held = self.held()
        left = max(stats.allocated - held.total - self._before, 0)
        self._activations = min(left, self._activations) if phase == "step" else left
        self._samples.append(
            Sample(phase, unit, seconds, held, self._activations, stats.allocated, stats.peak, self._away)
        )

    def _bits(self, is_set: Callable[[GroupGradients], bool]) -> int:
        reducer = self._reducer()
        gradients = () if reducer is None else reducer.all
        return sum(is_set(each) << n for n, each in enumerate(gradients))

    def end(self) -> None:
        """The optimizer has stepped."""
        if self._follows:
            self.mark("step", "")
            history = self._history.end()
            self.wants_history = self.wants_history and self.steps > 1
            self.report = self._untold = MemoryReport(
                tuple(self._samples), self._memory.stats().capacity, self._exact, history
            )
            self.steps -= 1
        self.drop()

    def tell(self, observation: Observation) -> None:
        """Tell observers of the step that is just over, if it was followed."""
        report, self._untold = self._untold, None
        if report is not None:
            highest = max(report.peaks().values(), key=lambda peak: peak.use.total)
            text = f"peak {human(report.peak)} in {highest.phase}, at unit {highest.unit!r}"
            observation.event("memory", text, nbytes=report.peak, details=report.timeline())

    def drop(self) -> None:
        """Forget the step: what comes next is a new one."""
        self._history.drop()
        self._samples.clear()
        self._fresh = self._no_pending_forward = True
        self._follows = False

    def now(self) -> dict[str, int]:
        """Bytes of the device by category, for observers of the run. Looked up once in a while: where the
        device is the host, it takes longer than other reports."""
        if (began := time.monotonic()) > self._next_look:
            stats = self._memory.stats()
            self._next_look = time.monotonic() + max(LOOK_EVERY, LOOK_SHARE * (time.monotonic() - began))
            counted = {"allocated": stats.allocated, "peak": stats.peak, "capacity": stats.capacity}
            self._now = {**asdict(self.held()), **counted}
        return self._now

    def held(self) -> DeviceBytes:
        """What the engine holds of the device now."""
        held = sum((g.held() for unit in self._units for g in unit.groups), DeviceBytes())
        if (reducer := self._reducer()) is not None:
            held += DeviceBytes(gradients=reducer.device_bytes())
        if (optimizer := self._optimizer()) is not None:
            gradients = optimizer.self_stepping.gradient_bytes
            held += DeviceBytes(gradients=gradients, optimizer=optimizer.bytes_beside_records())
        return held


class MemoryHistory:
    """torch's own record of allocations, while a step is followed; does nothing where torch keeps none.

    What it returns is pickled for https://pytorch.org/memory_viz.
    """

    def __init__(self, device: torch.device) -> None:
        memory: Any = getattr(torch.get_device_module(device), "memory", None)
        there = all(hasattr(memory, name) for name in ("_record_memory_history", "_snapshot"))
        self._memory = memory if there else None
        self._begun = False  # a record that the program has begun is its own

    def begin(self) -> None:
        if self._memory is not None:
            self._memory._record_memory_history(max_entries=_ENTRIES)
            self._begun = True

    def end(self) -> dict[str, Any] | None:
        """What has been recorded since `begin`; None for nothing."""
        if self._memory is None or not self._begun:
            return None
        found: dict[str, Any] = self._memory._snapshot()
        self.drop()
        return found

    def drop(self) -> None:
        """Stop the record that has begun here, if any."""
        if self._memory is not None and self._begun:
            self._memory._record_memory_history(enabled=None)
            self._begun = False
