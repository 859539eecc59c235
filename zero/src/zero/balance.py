"""How much optimizer state the device can hold, by measurement: `offload="auto"`.

The margin rule (Fang et al., PatrickStar, 2021; ColossalAI's gpu_margin_mem_ratio): what a step needs beside
optimizer state is measured with all of that on the host; records then move to the device as far as the
highest point of the step leaves room for them and for their gradients. Ranks take the smallest number that
any of them can hold. When a later step needs more than was measured, records move back: after it, or in the
middle of it, on the rank alone that has run out of memory, and behind the step the ranks are alike again.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

from accelz.accelerator import Accelerator
from zero.communicator import Communicator
from zero.group_gradients import GroupGradients
from zero.group_step import scratch_bytes
from zero.memory_tracer import MemoryTracer
from zero.offload import Tier
from zero.optimizer import ShardedOptimizer
from zero.second_try import SecondTry
from zero.sizes import human
from zero.tiers.stores import Stores
from zero.tiers.trace import MemoryReport

WARM_UP = 2  # steps measured: the second one is the first to gather ahead, and steps one record on the device
SAFETY_EXACT = 0.02  # of the capacity, kept free where memory is counted exactly
SAFETY = 0.1  # elsewhere: caches, fragments, and what others take


class Balancer:
    """Moves records between host and device, between steps and when a step runs out of memory.

    predicted_peak: bytes of the device that steps need from now on, by calculation; 0 before the plan.
    second_try: of operations that have found no room.
    """

    def __init__(
        self,
        stores: Stores,
        communicator: Communicator,
        tracer: MemoryTracer,
        optimizer: ShardedOptimizer,
        gradients: Sequence[GroupGradients],
    ) -> None:
        self.predicted_peak = 0
        self._accelerator = stores.accelerator
        self._communicator = communicator
        self._tracer = tracer
        self._optimizer = optimizer
        self._all = tuple(gradients)
        self._agreed: list[GroupGradients] = []  # to be on the device, by all ranks
        self._near: list[GroupGradients] = []  # of these, the first ones, that are
        self._steps = 0
        self._seen: MemoryReport | None = None
        self.second_try = SecondTry(self._accelerator, self._relieve_all, self._movable)
        self._useful = stores.resolve("host") == "host"
        if self._useful:
            tracer.steps = WARM_UP
            stores.relieve = self.relieve

    def after_step(self) -> None:
        """Collective. Plan after the warm-up; make room when a step has come too close to the limit."""
        if not self._useful:
            return
        self._steps += 1
        if self._steps > WARM_UP:
            self._follow_growth()
            return
        self._seen = self._tracer.report
        assert self._seen is not None
        largest = sorted(self._all, key=lambda have: -have.group.layout.shard_numel)
        if self._steps < WARM_UP:
            self._place(self._fitting(self._seen, largest, probes=1))
        else:
            near = self._fitting(self._seen, largest, probes=len(largest))
            self.predicted_peak = self._peak_with(self._seen, near)
            self._place(near)
        self._accelerator.memory.reset_peak()

    def relieve(self, nbytes: int) -> int:
        """Move records to the host until `nbytes` are free, on this rank alone; returns bytes moved."""
        freed = 0
        while self._near and freed < nbytes:
            have = self._near.pop()
            freed += self._record_bytes(have)
            self._move(have, "host")
        if freed:
            self._accelerator.memory.trim()
            self._accelerator.memory.reset_peak()  # what follows tells how much may come back
            warnings.warn(
                f"the device ran out of memory: {human(freed)} of optimizer state moved to the host, so that "
                "what failed can be repeated. Steps need more than was measured at first",
                RuntimeWarning,
                stacklevel=2,
            )
        return freed

    def _movable(self) -> int:
        return sum(map(self._record_bytes, self._near))

    def _relieve_all(self) -> int:
        return self.relieve(self._accelerator.memory.stats().capacity)

    def _fitting(
        self, report: MemoryReport, candidates: Sequence[GroupGradients], probes: int
    ) -> list[GroupGradients]:
        """Up to `probes` groups that the device of every rank has room for."""
        limit = usable(self._accelerator)
        found: list[GroupGradients] = []
        for have in candidates:
            if len(found) < probes and self._peak_with(report, [*found, have]) <= limit:
                found.append(have)
        mine = [self._all.index(have) for have in found]
        agreed = set.intersection(*(set(theirs) for theirs in self._communicator.share_all(mine)))
        return [have for have in found if self._all.index(have) in agreed]

    def _place(self, near: list[GroupGradients]) -> None:
        for have in self._near:
            if have not in near:
                self._move(have, "host")
        for have in near:
            if have not in self._near:
                self._move(have, "device")
        self._agreed, self._near = near, list(near)

    def _peak_with(self, report: MemoryReport, near: Sequence[GroupGradients]) -> int:
        """The highest point of the measured step, were the records and gradients of `near` on the device."""
        come = [have for have in near if have not in self._near]
        gone = [have for have in self._near if have not in near]
        records = sum(map(self._record_bytes, come)) - sum(map(self._record_bytes, gone))
        scratch = 0 if self._near else max(map(self._scratch_bytes, come), default=0)
        return max(
            sample.peak
            + records
            + sum(have.slice_bytes for have in come if sample.away >> self._all.index(have) & 1)
            + (scratch if sample.phase == "step" else 0)
            for sample in report.samples
        )

    def _scratch_bytes(self, have: GroupGradients) -> int:
        """The most that stepping a record may take, for as long as that has not been measured."""
        return scratch_bytes(have.group.layout.shard_numel, self._accelerator.kernels.chunk)

    def _follow_growth(self) -> None:
        """Place again what was agreed on, as far as every rank has room for it, where a step needed more."""
        peak = self._peak()
        relieved = len(self._near) < len(self._agreed)
        if self._communicator.agree(relieved or (bool(self._near) and peak > usable(self._accelerator))):
            fitting = min(self._communicator.share_all(self._fitting_above(peak)))
            self.predicted_peak = self._above(peak, fitting)
            self._place(self._agreed[:fitting])
            self._accelerator.memory.reset_peak()

    def _peak(self) -> int:
        """The highest point since records last moved; of a traced step, the tracer has it."""
        report, self._seen = self._seen, self._tracer.report
        traced = self._seen.peak if self._seen is not None and self._seen is not report else 0
        return max(traced, self._accelerator.memory.stats().peak)

    def _fitting_above(self, peak: int) -> int:
        """How many of the agreed records this rank has room for. peak: of a step with those near."""
        limit = usable(self._accelerator)
        fitting = (n for n in range(len(self._agreed), 0, -1) if self._above(peak, n) <= limit)
        return next(fitting, 0)

    def _above(self, peak: int, count: int) -> int:
        """`peak`, were the first `count` of the agreed records on the device."""
        here = len(self._near)
        come = self._agreed[here:count]
        scratch = 0 if self._near else max(map(self._scratch_bytes, come), default=0)
        come_bytes = sum(self._record_bytes(have) + have.slice_bytes for have in come) + scratch
        return peak + come_bytes - sum(map(self._record_bytes, self._near[count:]))

    def _move(self, have: GroupGradients, tier: Tier) -> None:
        self._optimizer.move(have.group, tier)
        have.group.placement = replace(have.group.placement, optimizer=tier, gradients=tier)

    def _record_bytes(self, have: GroupGradients) -> int:
        """Bytes of the device that a record takes there; an fp32 master is the shard itself."""
        group = have.group
        shard_serves = group.dtype is group.kept.master.dtype and group.placement.params == "device"
        master = 0 if shard_serves else group.kept.master.numel() * group.kept.master.element_size()
        return master + self._optimizer.moments_bytes(group)


def usable(accelerator: Accelerator) -> int:
    """Bytes of the device that may be planned with."""
    exact = accelerator.capabilities.exact_memory
    return int(accelerator.memory.stats().capacity * (1 - (SAFETY_EXACT if exact else SAFETY)))
