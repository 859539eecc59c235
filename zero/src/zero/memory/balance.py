"""How much optimizer state the device can hold, by measurement: `offload="auto"`.

The margin rule (Fang et al., PatrickStar, 2021; ColossalAI's gpu_margin_mem_ratio): what a step needs besides
optimizer state is measured with all of that state on the host; then records move to the device as far as the
highest point of the step leaves room for them and for their gradients. Ranks move only what all of them can
hold; `Forecast` does the arithmetic. When a later step needs more than was measured, records move back: after
the step or, on the one rank that has no room, before its update or in the middle of it. After that step the
ranks are alike again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import InitVar, dataclass, replace
from typing import Any

import torch
from torch import nn

from zero.communication.communicator import Communicator
from zero.config.sizes import human
from zero.gradients.reducer import GradientReducer
from zero.memory.forecast import Forecast
from zero.memory.memory_report import MemoryReport
from zero.memory.memory_tracer import MemoryTracer
from zero.memory.oom_retry import OomRetry
from zero.memory.placement_policy import StaticPlacementPolicy, asking_to_repeat
from zero.optimizer.sharded_optimizer import ShardedOptimizer
from zero.optimizer.stepped import SteppedSubGroup
from zero.sharding.lifetime import weakly
from zero.sharding.sharded_unit import ShardedUnit
from zero.tiers.room import usable
from zero.tiers.tier import ON_DEVICE, ON_HOST, Tier
from zero.warning import warn

MEASURED_STEPS = 2  # the second is the first to gather ahead, and has one record of each kind near


_RAN_OUT = (
    "the device of rank {} ran out of memory: {} of optimizer state was moved to the host so that the failed "
    "operation can be repeated. Steps need more memory than was first measured"
)
_FAILED = (
    "a loss.backward() of rank {} has failed: {} of optimizer state was moved to the host, in case it ran "
    "out of memory. The gradients of this step are dropped: run its micro-batches again, on every rank"
)


@dataclass(eq=False, repr=False)
class AutoPlacementPolicy(StaticPlacementPolicy):
    """Moves records between host and device, between steps and when a step runs out of memory, and repeats
    what has found no room once they have made some.

    repeated: modules whose operations are repeated one by one, by `oom_retry`.
    """

    units: Sequence[ShardedUnit]
    communicator: Communicator
    tracer: MemoryTracer
    optimizer: ShardedOptimizer
    reducer: GradientReducer
    repeated: InitVar[Iterable[nn.Module]]

    def __post_init__(self, repeated: Iterable[nn.Module]) -> None:
        super().__post_init__()
        self._forecast = Forecast(self.optimizer, self.reducer, self._accelerator.kernels.chunk)
        self._agreed: list[SteppedSubGroup] = []  # that all ranks want on the device
        self._near: list[SteppedSubGroup] = []  # the first of these, which are there
        self._steps = 0
        self._seen: MemoryReport | None = None
        self._before = 0  # the highest point since records last moved, from before the state was away
        self._repeated = tuple(dict.fromkeys(repeated))
        self.oom_retry = OomRetry(self._accelerator, weakly(self._relieve_all), weakly(self._movable))
        self.oom_retry.wrap(self._repeated)
        self._useful = not self.stores.host.near
        self._warm_up = MEASURED_STEPS + any(stepped.rule is None for stepped in self.optimizer.subs)
        if self._useful:
            self.tracer.steps = self._warm_up

    def forward(
        self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], recover: Callable[[], None]
    ) -> Any:
        before = self._accelerator.rng.get_state()
        try:
            return module(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            for unit in self.units:
                unit.release()  # what was gathered ahead; the forward's hooks have released the rest
            self.make_room(error)
            if self.communicator.group.size > 1:
                recover()
                raise asking_to_repeat("forward") from error
        self._accelerator.rng.set_state(before)
        return module(*args, **kwargs)

    def repeating(self) -> AbstractContextManager[None]:
        return self.oom_retry.on() if self._repeated else nullcontext()

    def before_step(self) -> None:
        """Make sure that there is room for what the step takes: an optimizer that finds none has already
        changed some values."""
        if not self._useful:
            return
        if any(not have.group.placement.gradients.near for have in self.reducer.all):
            self.reducer.land()
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
        before, self._seen = self._seen, self.tracer.report
        followed = self._seen is not None and self._seen is not before
        # An optimizer that steps itself and was held back does not show what state it keeps.
        if self.communicator.agree(not followed or self.optimizer.held_back):
            self.tracer.steps = max(self.tracer.steps, self._warm_up - self._steps)
            return
        assert self._seen is not None
        self._steps += 1
        self._plan(self._seen)

    def _plan(self, report: MemoryReport) -> None:
        """Place records by the step that was measured: first one of each kind, then as many as fit."""
        self._forecast.learn(report, self._near)
        largest = sorted(self.optimizer.subs, key=lambda stepped: -stepped.group.layout.shard_numel)
        if self._steps == 1:
            self._place(self._fitting(report, largest, probes=1))
        else:
            near = self._fitting(report, largest, probes=len(largest))
            self.predicted_peak = self._forecast.peak(report, self._near, near)
            self._place(near)
        self._count_anew()

    def pause(self) -> None:
        self._before = max(self._before, self._accelerator.memory.stats().peak)

    def resume(self) -> None:
        self._accelerator.memory.reset_peak()

    def after_failure(self) -> None:
        """Move state to the host, since the backward may have found no room: nobody has told."""
        if self._useful:
            self.relieve(self._accelerator.memory.stats().capacity, _FAILED)

    def relieve(self, nbytes: int, told: str = _RAN_OUT) -> int:
        """Move records to the host until `nbytes` are free, on this rank alone; returns the bytes moved.

        told: the warning, with places for the rank and the bytes.
        """
        freed = 0
        while self._near and freed < nbytes:
            stepped = self._near.pop()
            freed += self._forecast.records_bytes([stepped])
            self._move(stepped, ON_HOST)
        if freed:
            self._accelerator.memory.trim()
            self._count_anew()  # the next steps tell how much may come back
            self.communicator.observation.event(
                "out of memory", f"{human(freed)} of optimizer state was moved to the host", nbytes=freed
            )
            warn(told.format(self.communicator.group.rank, human(freed)), RuntimeWarning)
        return freed

    def _movable(self) -> int:
        return self._forecast.records_bytes(self._near)

    def _relieve_all(self) -> int:
        return self.relieve(self._accelerator.memory.stats().capacity)

    def _fitting(
        self, report: MemoryReport, candidates: Sequence[SteppedSubGroup], probes: int
    ) -> list[SteppedSubGroup]:
        """Up to `probes` sub-groups that kernels step, and as many others, for which every rank's device has
        room."""
        limit, places = usable(self._accelerator), self.optimizer.subs
        found: list[SteppedSubGroup] = []
        for stepped in candidates:
            alike = [each for each in found if (each.rule is None) == (stepped.rule is None)]
            if len(alike) < probes and self._forecast.peak(report, self._near, [*found, stepped]) <= limit:
                found.append(stepped)
        mine = [places.index(stepped) for stepped in found]
        agreed = set.intersection(*(set(theirs) for theirs in self.communicator.all_gather_object(mine)))
        return [stepped for stepped in found if places.index(stepped) in agreed]

    def _place(self, near: list[SteppedSubGroup]) -> None:
        """Move the records that all ranks have agreed on. From the first for which this rank's device has no
        room after all, they stay on the host; the ranks then agree anew after the next step."""
        for stepped in self._near:
            if stepped not in near:
                self._move(stepped, ON_HOST)
        self._agreed, self._near = near, []
        room = True
        for stepped in near:
            room = room and self._found_room(stepped)
            if room:
                self._near.append(stepped)
            else:
                self._move(stepped, ON_HOST)
        nbytes = self._forecast.records_bytes(self._near)
        text = f"{human(nbytes)} of optimizer state is on the device, the rest on the host"
        self.communicator.observation.event("placement", text, nbytes=nbytes)

    def _found_room(self, stepped: SteppedSubGroup) -> bool:
        try:
            self._move(stepped, ON_DEVICE)
        except torch.OutOfMemoryError:
            return False
        return True

    def _follow_growth(self) -> None:
        """Where a step needed more, place again what was agreed on, as far as every rank has room for it."""
        peak = self._peak()
        relieved = len(self._near) < len(self._agreed)
        if self.communicator.agree(relieved or (bool(self._near) and peak > usable(self._accelerator))):
            fitting = min(self.communicator.all_gather_object(self._fitting_above(peak)))
            self.predicted_peak = self._forecast.peak_above(peak, self._near, self._agreed[:fitting])
            self._place(self._agreed[:fitting])
            self._count_anew()

    def _count_anew(self) -> None:
        self._before = 0
        self._accelerator.memory.reset_peak()

    def _peak(self) -> int:
        """The highest point since records last moved; if the step was traced, the tracer has it."""
        report, self._seen = self._seen, self.tracer.report
        traced = self._seen.peak if self._seen is not None and self._seen is not report else 0
        return max(traced, self._before, self._accelerator.memory.stats().peak)

    def _fitting_above(self, peak: int) -> int:
        """How many of the agreed records this rank has room for. peak: of a step with those that are on the
        device now."""
        limit = usable(self._accelerator)
        forecast = self._forecast.peak_above
        counts = range(len(self._agreed), 0, -1)
        return next((n for n in counts if forecast(peak, self._near, self._agreed[:n]) <= limit), 0)

    def _move(self, stepped: SteppedSubGroup, tier: Tier) -> None:
        self.optimizer.move(stepped, tier)
        stepped.sub.tier, group = tier, stepped.group
        gradients = ON_DEVICE if all(sub.tier.near for sub in group.subs) else ON_HOST
        group.placement = replace(group.placement, gradients=gradients)
