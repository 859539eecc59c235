"""How much optimizer state the device can hold, by measurement: `offload="auto"`.

The margin rule (Fang et al., PatrickStar, 2021; ColossalAI's gpu_margin_mem_ratio): what a step needs besides
optimizer state is measured with all of that state on the host; then records move to the device as far as the
highest point of the step leaves room for them and for their gradients. Ranks move only what all of them can
hold; `Forecast` does the arithmetic. When a later step needs more than was measured, records move back: after
the step or, on the one rank that has no room, before its update or in the middle of it. After that step the
ranks are alike again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from accelz import Accelerator
from zero.communication.communicator import Communicator
from zero.config.offload import Tier
from zero.config.sizes import human
from zero.gradients.reducer import GradientReducer
from zero.memory.forecast import Forecast
from zero.memory.memory_report import MemoryReport
from zero.memory.memory_tracer import MemoryTracer
from zero.memory.oom_retry import OomRetry
from zero.optimizer.owned import OwnedSubGroup
from zero.optimizer.sharded_optimizer import ShardedOptimizer
from zero.sharding.lifetime import weakly
from zero.tiers.stores import Stores
from zero.warning import warn

MEASURED_STEPS = 2  # the second is the first to gather ahead, and has one record of each kind near
SAFETY_EXACT = 0.02  # of the capacity, kept free where memory is counted to the byte
SAFETY = 0.1  # elsewhere: caches, fragments, and what others take


class Balancer:
    """Moves records between host and device, between steps and when a step runs out of memory.

    predicted_peak: bytes of the device that steps need from now on, by calculation; 0 before the plan.
    oom_retry: repeats operations that have found no room.
    """

    def __init__(
        self,
        stores: Stores,
        communicator: Communicator,
        tracer: MemoryTracer,
        optimizer: ShardedOptimizer,
        reducer: GradientReducer,
    ) -> None:
        self.predicted_peak = 0
        self._accelerator = stores.accelerator
        self._communicator = communicator
        self._tracer = tracer
        self._optimizer = optimizer
        self._reducer = reducer
        self._forecast = Forecast(optimizer, reducer, stores.accelerator.kernels.chunk)
        self._agreed: list[OwnedSubGroup] = []  # that all ranks want on the device
        self._near: list[OwnedSubGroup] = []  # the first of these, which are there
        self._steps = 0
        self._seen: MemoryReport | None = None
        self._before = 0  # the highest point since records last moved, from before the state was away
        self.oom_retry = OomRetry(self._accelerator, weakly(self._relieve_all), weakly(self._movable))
        self._useful = stores.resolve("host") == "host"
        self._warm_up = MEASURED_STEPS + any(owned.rule is None for owned in optimizer.subs)
        if self._useful:
            tracer.steps = self._warm_up

    def before_step(self) -> None:
        """Make sure that there is room for what the step takes: an optimizer that finds none has already
        changed some values."""
        if not self._useful:
            return
        if any(have.group.placement.gradients != "device" for have in self._reducer.all):
            self._reducer.land()
            self._accelerator.streams.synchronize()  # what has landed still counts until streams pass it
        missing = self._forecast.update_bytes(self._near) - self._accelerator.memory.stats().free
        if self._near and missing > 0:
            self.relieve(missing)

    def after_step(self) -> None:
        """Collective. Place records after the warm-up; later, make room when a step has come too close to the
        limit."""
        if not self._useful:
            return
        if self._steps == self._warm_up:
            self._follow_growth()
            return
        before, self._seen = self._seen, self._tracer.report
        followed = self._seen is not None and self._seen is not before
        # An optimizer that steps itself and was held back does not show what state it keeps.
        if self._communicator.agree(not followed or self._optimizer.held_back):
            self._tracer.steps = max(self._tracer.steps, self._warm_up - self._steps)
            return
        assert self._seen is not None
        self._steps += 1
        self._plan(self._seen)

    def _plan(self, report: MemoryReport) -> None:
        """Place records by the step that was measured: first one of each kind, then as many as fit."""
        self._forecast.learn(report, self._near)
        largest = sorted(self._optimizer.subs, key=lambda owned: -owned.group.layout.shard_numel)
        if self._steps == 1:
            self._place(self._fitting(report, largest, probes=1))
        else:
            near = self._fitting(report, largest, probes=len(largest))
            self.predicted_peak = self._forecast.peak(report, self._near, near)
            self._place(near)
        self._count_anew()

    def pause(self) -> None:
        """The state leaves the device: until `resume`, others use its memory."""
        self._before = max(self._before, self._accelerator.memory.stats().peak)

    def resume(self) -> None:
        """The state is back."""
        self._accelerator.memory.reset_peak()

    def relieve(self, nbytes: int) -> int:
        """Move records to the host until `nbytes` are free, on this rank alone; returns the bytes moved."""
        freed = 0
        while self._near and freed < nbytes:
            owned = self._near.pop()
            freed += self._forecast.records_bytes([owned])
            self._move(owned, "host")
        if freed:
            self._accelerator.memory.trim()
            self._count_anew()  # the next steps tell how much may come back
            warn(
                f"the device of rank {self._communicator.group.rank} ran out of memory: {human(freed)} of "
                "optimizer state was moved to the host so that the failed operation can be repeated. Steps "
                "need more memory than was first measured",
                RuntimeWarning,
            )
        return freed

    def _movable(self) -> int:
        return self._forecast.records_bytes(self._near)

    def _relieve_all(self) -> int:
        return self.relieve(self._accelerator.memory.stats().capacity)

    def _fitting(
        self, report: MemoryReport, candidates: Sequence[OwnedSubGroup], probes: int
    ) -> list[OwnedSubGroup]:
        """Up to `probes` sub-groups that kernels step, and as many others, for which every rank's device has
        room."""
        limit, places = usable(self._accelerator), self._optimizer.subs
        found: list[OwnedSubGroup] = []
        for owned in candidates:
            alike = [each for each in found if (each.rule is None) == (owned.rule is None)]
            if len(alike) < probes and self._forecast.peak(report, self._near, [*found, owned]) <= limit:
                found.append(owned)
        mine = [places.index(owned) for owned in found]
        agreed = set.intersection(*(set(theirs) for theirs in self._communicator.all_gather_object(mine)))
        return [owned for owned in found if places.index(owned) in agreed]

    def _place(self, near: list[OwnedSubGroup]) -> None:
        """Move the records that all ranks have agreed on. From the first for which this rank's device has no
        room after all, they stay on the host; the ranks then agree anew after the next step."""
        for owned in self._near:
            if owned not in near:
                self._move(owned, "host")
        self._agreed, self._near = near, []
        room = True
        for owned in near:
            room = room and self._found_room(owned)
            if room:
                self._near.append(owned)
            else:
                self._move(owned, "host")

    def _found_room(self, owned: OwnedSubGroup) -> bool:
        try:
            self._move(owned, "device")
        except torch.OutOfMemoryError:
            return False
        return True

    def _follow_growth(self) -> None:
        """Where a step needed more, place again what was agreed on, as far as every rank has room for it."""
        peak = self._peak()
        relieved = len(self._near) < len(self._agreed)
        if self._communicator.agree(relieved or (bool(self._near) and peak > usable(self._accelerator))):
            fitting = min(self._communicator.all_gather_object(self._fitting_above(peak)))
            self.predicted_peak = self._forecast.peak_above(peak, self._near, self._agreed[:fitting])
            self._place(self._agreed[:fitting])
            self._count_anew()

    def _count_anew(self) -> None:
        self._before = 0
        self._accelerator.memory.reset_peak()

    def _peak(self) -> int:
        """The highest point since records last moved; if the step was traced, the tracer has it."""
        report, self._seen = self._seen, self._tracer.report
        traced = self._seen.peak if self._seen is not None and self._seen is not report else 0
        return max(traced, self._before, self._accelerator.memory.stats().peak)

    def _fitting_above(self, peak: int) -> int:
        """How many of the agreed records this rank has room for. peak: of a step with those that are on the
        device now."""
        limit = usable(self._accelerator)
        forecast = self._forecast.peak_above
        counts = range(len(self._agreed), 0, -1)
        return next((n for n in counts if forecast(peak, self._near, self._agreed[:n]) <= limit), 0)

    def _move(self, owned: OwnedSubGroup, tier: Tier) -> None:
        self._optimizer.move(owned, tier)
        owned.sub.tier, group = tier, owned.group
        gradients: Tier = "device" if all(sub.tier == "device" for sub in group.subs) else "host"
        group.placement = replace(group.placement, gradients=gradients)


def usable(accelerator: Accelerator) -> int:
    """Bytes of the device that may be planned with, out of what it has and what others leave of that."""
    stats = accelerator.memory.stats()
    safety = SAFETY_EXACT if accelerator.capabilities.counts_every_byte else SAFETY
    return int(min(stats.capacity, stats.allocated + stats.free) * (1 - safety))
