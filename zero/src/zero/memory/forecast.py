"""What a step will take of the device with other optimizer state there than when it was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from zero.gradients.group_gradients import GroupGradients
from zero.gradients.reducer import GradientReducer
from zero.memory.memory_report import MemoryReport
from zero.memory.temporaries import Temporaries
from zero.optimizer.sharded_optimizer import ShardedOptimizer
from zero.optimizer.stepped import SteppedSubGroup

Subs = Sequence[SteppedSubGroup]


class Forecast:
    """Peaks of steps, in bytes, by the sub-groups whose records are on the device: `now` those of the step
    that was measured, `then` those of the steps to come.

    chunk: the most elements that the device's kernels work on at once.
    """

    def __init__(self, optimizer: ShardedOptimizer, reducer: GradientReducer, chunk: int) -> None:
        self._optimizer = optimizer
        self._reducer = reducer
        self._chunk = chunk
        self._gradients = {have.group: have for have in reducer.all}
        self._temporaries = Temporaries()

    def learn(self, report: MemoryReport, now: Subs) -> None:
        """Learn from a measured step what its update took besides state and gradients."""
        unserved = _unserved(now)
        self._temporaries.learn_unserved(_numel(unserved), self._together(unserved), report)
        served = [stepped for stepped in now if stepped.rule is not None]
        if len(served) == 1:
            (stepped,) = served
            self._temporaries.learn_kernels(self._at_once(stepped), self._coming_bytes(stepped), report)

    def peak(self, report: MemoryReport, now: Subs, then: Subs) -> int:
        """The highest point that the measured step would have with the records of `then` on the device, and
        with the gradients of the groups that they leave nothing of on the host."""
        before, after = set(now), set(then)
        come = [stepped for stepped in then if stepped not in before]
        gone = [stepped for stepped in now if stepped not in after]
        slices = [
            (1 << place, have.slice_bytes)
            for place, have in enumerate(self._reducer.all)
            if self._is_whole(have, after) and not self._is_whole(have, before)
        ]
        levels = _levels(report, self._growth(now, then))
        return (
            self.records_bytes(come)
            - self.records_bytes(gone)
            + max(peak + sum(nbytes for bit, nbytes in slices if away & bit) for away, peak in levels.items())
        )

    def peak_above(self, peak: int, now: Subs, then: Subs) -> int:
        """An upper bound for steps that took `peak` with `now`. One of `now` and `then` begins with the
        other."""
        come = then[len(now) :]
        groups = dict.fromkeys(stepped.group for stepped in come)
        slices = sum(self._gradients[group].slice_bytes for group in groups)
        gone = self.records_bytes(now[len(then) :])
        return peak + self.records_bytes(come) + slices + max(0, self._growth(now, then)) - gone

    def update_bytes(self, now: Subs) -> int:
        """The most bytes of the device that the update takes besides what is there when it begins."""
        served = [stepped for stepped in now if stepped.rule is not None]
        kernels = max((self._coming_bytes(o) + self._scratch_bytes(o) for o in served), default=0)
        unserved = _unserved(now)
        coming = max(map(self._coming_bytes, unserved), default=0)
        return max(kernels, self._unserved_bytes(unserved) + coming)

    def records_bytes(self, subs: Subs) -> int:
        """Bytes that the records of these take on the device, without masters that are the shard itself."""
        return sum(map(self._record_bytes, subs))

    def _record_bytes(self, stepped: SteppedSubGroup) -> int:
        group, master = stepped.group, stepped.record.master
        shard_serves = group.dtype is master.dtype and group.placement.params.near
        apart = 0 if shard_serves else master.numel() * master.element_size()
        return apart + self._optimizer.moments_bytes(stepped)

    def _is_whole(self, have: GroupGradients, near: set[SteppedSubGroup]) -> bool:
        """Whether all of a group is in `near`, so that its gradient stays on the device."""
        return all(stepped in near for stepped in self._optimizer.subs_of[have.group])

    def _growth(self, now: Subs, then: Subs) -> int:
        """How many more bytes of the device the update takes with the records of `then` there than with those
        of `now`."""

        def more(bytes_of: Callable[[SteppedSubGroup], int], served: bool) -> int:
            return max(0, _most(bytes_of, then, served) - _most(bytes_of, now, served))

        unserved = self._unserved_bytes(_unserved(then)) - self._unserved_bytes(_unserved(now))
        came = max(more(self._coming_bytes, served) for served in (True, False))
        return unserved + came + more(self._scratch_bytes, served=True)

    def _unserved_bytes(self, unserved: Subs) -> int:
        """Bytes that optimizers that step themselves take, for all of their records at once."""
        temporaries = self._temporaries.unserved(_numel(unserved), self._together(unserved))
        return self._optimizer.self_stepping.bytes_for(unserved) + temporaries

    def _together(self, subs: Subs) -> dict[int, int]:
        """By index, the elements of the param_groups that no sub-group but `subs` has pieces of."""
        mine = set(subs)
        far = {p.param_group for o in _unserved(self._optimizer.subs) if o not in mine for p in o.pieces}
        sizes: dict[int, int] = {}
        for piece in [piece for stepped in subs for piece in stepped.pieces if piece.param_group not in far]:
            sizes[piece.param_group] = sizes.get(piece.param_group, 0) + piece.parameter.numel()
        return sizes

    def _coming_bytes(self, stepped: SteppedSubGroup) -> int:
        """Bytes of the gradient that is copied from the host when a record on the device is stepped: only
        where the group is in several tiers."""
        have = self._gradients[stepped.group]
        parts = len(self._optimizer.subs_of[stepped.group]) > 1
        return have.slice_bytes * stepped.sub.numel // stepped.group.layout.shard_numel if parts else 0

    def _scratch_bytes(self, stepped: SteppedSubGroup) -> int:
        return self._temporaries.kernels(self._at_once(stepped))

    def _at_once(self, stepped: SteppedSubGroup) -> int:
        """Elements of the sub-group that a kernel works on at once."""
        return min(stepped.sub.numel, self._chunk)


def _levels(report: MemoryReport, scratch: int) -> dict[int, int]:
    """The highest points of a step, by which of the gradients were away at that time. scratch: bytes that the
    update takes in addition."""
    levels: dict[int, int] = {}
    for sample in report.samples:
        peak = sample.peak + (scratch if sample.phase == "step" else 0)
        levels[sample.away] = max(peak, levels.get(sample.away, 0))
    return levels


def _unserved(subs: Iterable[SteppedSubGroup]) -> list[SteppedSubGroup]:
    """Those that the user's optimizer steps itself."""
    return [stepped for stepped in subs if stepped.rule is None]


def _numel(subs: Subs) -> int:
    return sum(stepped.numel for stepped in subs)


def _most(bytes_of: Callable[[SteppedSubGroup], int], subs: Subs, served: bool) -> int:
    return max((bytes_of(stepped) for stepped in subs if (stepped.rule is not None) == served), default=0)
