"""How much optimizer state the device can hold, by measurement: `offload="auto"`.

The margin rule (Fang et al., PatrickStar, 2021; ColossalAI's gpu_margin_mem_ratio): what a step needs beside
optimizer state is measured with all of that on the host; records then move to the device as far as the
highest point of the step leaves room for them and for their gradients. Ranks take the smallest number that
any of them can hold. What an optimizer takes that steps itself is learned on the way: see `Temporaries`. When
a later step needs more than was measured, records move back: after it, or before its update or in the middle
of it, on the rank alone that has no room, and behind the step the ranks are alike again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from accelz.accelerator import Accelerator
from zero.communication.communicator import Communicator
from zero.gradients.group_gradients import GroupGradients
from zero.gradients.reducer import GradientReducer
from zero.offload.memory_tracer import MemoryTracer
from zero.offload.second_try import SecondTry
from zero.offload.temporaries import Temporaries
from zero.optimizer.owned import OwnedSubGroup
from zero.optimizer.sharded_optimizer import ShardedOptimizer
from zero.settings.offload import Tier
from zero.settings.sizes import human
from zero.tiers.stores import Stores
from zero.tiers.trace import MemoryReport

WARM_UP = 2  # steps measured: the second is the first to gather ahead, and steps one record of each kind near
SAFETY_EXACT = 0.02  # of the capacity, kept free where memory is counted to the byte
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
        reducer: GradientReducer,
    ) -> None:
        self.predicted_peak = 0
        self._accelerator = stores.accelerator
        self._communicator = communicator
        self._tracer = tracer
        self._optimizer = optimizer
        self._reducer = reducer
        self._gradients = {have.group: have for have in reducer.all}
        self._temporaries = Temporaries()
        self._agreed: list[OwnedSubGroup] = []  # to be on the device, by all ranks
        self._near: list[OwnedSubGroup] = []  # of these, the first ones, that are
        self._steps = 0
        self._seen: MemoryReport | None = None
        self._before = 0  # the highest point since records last moved, before the state was away
        self.second_try = SecondTry(self._accelerator, self._relieve_all, self._movable)
        self._useful = stores.resolve("host") == "host"
        self._warm_up = WARM_UP + any(owned.rule is None for owned in optimizer.subs)
        if self._useful:
            tracer.steps = self._warm_up
            stores.relieve = self.relieve

    def before_step(self) -> None:
        """Have room for what the step takes: an optimizer that finds none has changed some values already."""
        if not self._useful:
            return
        if any(have.group.placement.gradients != "device" for have in self._reducer.all):
            self._reducer.land()
            self._accelerator.streams.synchronize()  # what has landed counts until streams have passed it
        missing = self._step_bytes(self._near) - self._accelerator.memory.stats().free
        if self._near and missing > 0:
            self.relieve(missing)

    def after_step(self) -> None:
        """Collective. Plan after the warm-up; make room when a step has come too close to the limit."""
        if not self._useful:
            return
        if self._steps == self._warm_up:
            self._follow_growth()
            return
        before, self._seen = self._seen, self._tracer.report
        followed = self._seen is not None and self._seen is not before
        # Held back, an optimizer that steps itself does not tell what state it keeps.
        if self._communicator.agree(not followed or self._optimizer.held_back):
            self._tracer.steps = max(self._tracer.steps, self._warm_up - self._steps)
            return
        assert self._seen is not None
        self._steps += 1
        self._plan(self._seen)

    def _plan(self, report: MemoryReport) -> None:
        """Place records by the step that was measured: first one of each kind, then as many as fit."""
        self._learn(report)
        largest = sorted(self._optimizer.subs, key=lambda owned: -owned.group.layout.shard_numel)
        if self._steps == 1:
            self._place(self._fitting(report, largest, probes=1))
        else:
            near = self._fitting(report, largest, probes=len(largest))
            self.predicted_peak = self._peak_with(report, near)
            self._place(near)
        self._count_anew()

    def _learn(self, report: MemoryReport) -> None:
        own = _unserved(self._near)
        self._temporaries.learn_own(_numel(own), self._together(own), report)
        served = [owned for owned in self._near if owned.rule is not None]
        if len(served) == 1:
            (owned,) = served
            self._temporaries.learn_kernels(self._at_once(owned), self._coming_bytes(owned), report)

    def pause(self) -> None:
        """The state goes: until `resume` the device's memory is used by others."""
        self._before = max(self._before, self._accelerator.memory.stats().peak)

    def resume(self) -> None:
        """The state is back."""
        self._accelerator.memory.reset_peak()

    def relieve(self, nbytes: int) -> int:
        """Move records to the host until `nbytes` are free, on this rank alone; returns bytes moved."""
        freed = 0
        while self._near and freed < nbytes:
            owned = self._near.pop()
            freed += self._record_bytes(owned)
            self._move(owned, "host")
        if freed:
            self._accelerator.memory.trim()
            self._count_anew()  # what follows tells how much may come back
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
        self, report: MemoryReport, candidates: Sequence[OwnedSubGroup], probes: int
    ) -> list[OwnedSubGroup]:
        """Up to `probes` sub-groups that kernels step, and as many others, which the device of every rank has
        room for."""
        limit, places = usable(self._accelerator), self._optimizer.subs
        found: list[OwnedSubGroup] = []
        for owned in candidates:
            alike = [each for each in found if (each.rule is None) == (owned.rule is None)]
            if len(alike) < probes and self._peak_with(report, [*found, owned]) <= limit:
                found.append(owned)
        mine = [places.index(owned) for owned in found]
        agreed = set.intersection(*(set(theirs) for theirs in self._communicator.share_all(mine)))
        return [owned for owned in found if places.index(owned) in agreed]

    def _place(self, near: list[OwnedSubGroup]) -> None:
        for owned in self._near:
            if owned not in near:
                self._move(owned, "host")
        for owned in near:
            if owned not in self._near:
                self._move(owned, "device")
        self._agreed, self._near = near, list(near)

    def _peak_with(self, report: MemoryReport, near: Sequence[OwnedSubGroup]) -> int:
        """The highest point of the measured step, were the records of `near` on the device, and their
        gradients where they leave none of the group's on the host."""
        then, now = set(near), set(self._near)
        come = [owned for owned in near if owned not in now]
        gone = [owned for owned in self._near if owned not in then]
        records = sum(map(self._record_bytes, come)) - sum(map(self._record_bytes, gone))
        slices = [
            (1 << place, have.slice_bytes)
            for place, have in enumerate(self._reducer.all)
            if self._is_whole(have, then) and not self._is_whole(have, now)
        ]
        levels = _levels(report, self._growth(near, self._near))
        return records + max(
            peak + sum(nbytes for bit, nbytes in slices if away & bit) for away, peak in levels.items()
        )

    def _is_whole(self, have: GroupGradients, near: set[OwnedSubGroup]) -> bool:
        """Whether all of a group is in `near`: its gradient stays on the device then."""
        return all(owned in near for owned in self._optimizer.owned[have.group])

    def _growth(self, then: Sequence[OwnedSubGroup], now: Sequence[OwnedSubGroup]) -> int:
        """What the update takes more of the device with the records `then` there than with `now`."""

        def more(bytes_of: Callable[[OwnedSubGroup], int], served: bool) -> int:
            return max(0, _most(bytes_of, then, served) - _most(bytes_of, now, served))

        both = [self._own_bytes(_unserved(subs)) for subs in (then, now)]
        came = max(more(self._coming_bytes, served) for served in (True, False))
        return both[0] - both[1] + came + more(self._scratch_bytes, served=True)

    def _step_bytes(self, near: Sequence[OwnedSubGroup]) -> int:
        """The most that the update takes of the device with the records `near` there."""
        served = [owned for owned in near if owned.rule is not None]
        kernels = max((self._coming_bytes(o) + self._scratch_bytes(o) for o in served), default=0)
        own = _unserved(near)
        return max(kernels, self._own_bytes(own) + max(map(self._coming_bytes, own), default=0))

    def _own_bytes(self, own: Sequence[OwnedSubGroup]) -> int:
        """What optimizers that step themselves take, all of their records at once."""
        step_bytes = sum(map(self._optimizer.step_bytes, own))
        return step_bytes + self._temporaries.own(_numel(own), self._together(own))

    def _together(self, own: Sequence[OwnedSubGroup]) -> dict[int, int]:
        """The elements of each param_group that none but `own` have pieces of."""
        mine = set(own)
        far = {p.param_group for o in _unserved(self._optimizer.subs) if o not in mine for p in o.pieces}
        sizes: dict[int, int] = {}
        for piece in [piece for owned in own for piece in owned.pieces if piece.param_group not in far]:
            sizes[piece.param_group] = sizes.get(piece.param_group, 0) + piece.parameter.numel()
        return sizes

    def _coming_bytes(self, owned: OwnedSubGroup) -> int:
        """Of a gradient that comes for the step from the host."""
        have = self._gradients[owned.group]
        parts = len(self._optimizer.owned[owned.group]) > 1
        return have.slice_bytes * owned.sub.numel // owned.group.layout.shard_numel if parts else 0

    def _scratch_bytes(self, owned: OwnedSubGroup) -> int:
        return self._temporaries.kernels(self._at_once(owned))

    def _at_once(self, owned: OwnedSubGroup) -> int:
        """Elements that a kernel works on at once."""
        return min(owned.sub.numel, self._accelerator.kernels.chunk)

    def _follow_growth(self) -> None:
        """Place again what was agreed on, as far as every rank has room for it, where a step needed more."""
        peak = self._peak()
        relieved = len(self._near) < len(self._agreed)
        if self._communicator.agree(relieved or (bool(self._near) and peak > usable(self._accelerator))):
            fitting = min(self._communicator.share_all(self._fitting_above(peak)))
            self.predicted_peak = self._above(peak, fitting)
            self._place(self._agreed[:fitting])
            self._count_anew()

    def _count_anew(self) -> None:
        self._before = 0
        self._accelerator.memory.reset_peak()

    def _peak(self) -> int:
        """The highest point since records last moved; of a traced step, the tracer has it."""
        report, self._seen = self._seen, self._tracer.report
        traced = self._seen.peak if self._seen is not None and self._seen is not report else 0
        return max(traced, self._before, self._accelerator.memory.stats().peak)

    def _fitting_above(self, peak: int) -> int:
        """How many of the agreed records this rank has room for. peak: of a step with those near."""
        limit = usable(self._accelerator)
        fitting = (n for n in range(len(self._agreed), 0, -1) if self._above(peak, n) <= limit)
        return next(fitting, 0)

    def _above(self, peak: int, count: int) -> int:
        """`peak`, were the first `count` of the agreed records on the device."""
        then, here = self._agreed[:count], len(self._near)
        come = then[here:]
        groups = dict.fromkeys(owned.group for owned in come)
        slices = sum(self._gradients[group].slice_bytes for group in groups)
        more = sum(map(self._record_bytes, come)) + slices + max(0, self._growth(then, self._near))
        return peak + more - sum(map(self._record_bytes, self._near[count:]))

    def _move(self, owned: OwnedSubGroup, tier: Tier) -> None:
        self._optimizer.move(owned, tier)
        owned.sub.tier, group = tier, owned.group
        gradients: Tier = "device" if all(sub.tier == "device" for sub in group.subs) else "host"
        group.placement = replace(group.placement, gradients=gradients)

    def _record_bytes(self, owned: OwnedSubGroup) -> int:
        """Bytes of the device that a record takes there; an fp32 master is the shard itself."""
        group, master = owned.group, owned.sub.kept.master
        shard_serves = group.dtype is master.dtype and group.placement.params == "device"
        apart = 0 if shard_serves else master.numel() * master.element_size()
        return apart + self._optimizer.moments_bytes(owned)


def _levels(report: MemoryReport, scratch: int) -> dict[int, int]:
    """The highest points of a step by which gradients were away. scratch: what the optimizer takes more."""
    levels: dict[int, int] = {}
    for sample in report.samples:
        peak = sample.peak + (scratch if sample.phase == "step" else 0)
        levels[sample.away] = max(peak, levels.get(sample.away, 0))
    return levels


def _unserved(subs: Iterable[OwnedSubGroup]) -> list[OwnedSubGroup]:
    """Those that the user's optimizer steps itself."""
    return [owned for owned in subs if owned.rule is None]


def _numel(subs: Iterable[OwnedSubGroup]) -> int:
    return sum(owned.numel for owned in subs)


def _most(bytes_of: Callable[[OwnedSubGroup], int], subs: Iterable[OwnedSubGroup], served: bool) -> int:
    return max((bytes_of(owned) for owned in subs if (owned.rule is not None) == served), default=0)


def usable(accelerator: Accelerator) -> int:
    """Bytes of the device that may be planned with: of what it has, and what others leave of it."""
    stats = accelerator.memory.stats()
    safety = SAFETY_EXACT if accelerator.capabilities.counts_every_byte else SAFETY
    return int(min(stats.capacity, stats.allocated + stats.free) * (1 - safety))
