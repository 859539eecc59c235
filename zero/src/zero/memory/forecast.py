"""What a step will take of the device with other optimizer state there than when it was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from zero.gradients.group_gradients import GroupGradients
from zero.gradients.reducer import GradientReducer
from zero.memory.memory_report import MemoryReport
from zero.memory.temporaries import Temporaries
from zero.optimizer.owned import OwnedSubGroup
from zero.optimizer.sharded_optimizer import ShardedOptimizer

Subs = Sequence[OwnedSubGroup]


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
        own = _unserved(now)
        self._temporaries.learn_own(_numel(own), self._together(own), report)
        served = [owned for owned in now if owned.rule is not None]
        if len(served) == 1:
            (owned,) = served
            self._temporaries.learn_kernels(self._at_once(owned), self._coming_bytes(owned), report)

    def peak(self, report: MemoryReport, now: Subs, then: Subs) -> int:
        """The highest point that the measured step would have with the records of `then` on the device, and
        with the gradients of the groups that they leave nothing of on the host."""
        before, after = set(now), set(then)
        come = [owned for owned in then if owned not in before]
        gone = [owned for owned in now if owned not in after]
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
        groups = dict.fromkeys(owned.group for owned in come)
        slices = sum(self._gradients[group].slice_bytes for group in groups)
        gone = self.records_bytes(now[len(then) :])
        return peak + self.records_bytes(come) + slices + max(0, self._growth(now, then)) - gone

    def update_bytes(self, now: Subs) -> int:
        """The most bytes of the device that the update takes besides what is there when it begins."""
        served = [owned for owned in now if owned.rule is not None]
        kernels = max((self._coming_bytes(o) + self._scratch_bytes(o) for o in served), default=0)
        own = _unserved(now)
        return max(kernels, self._own_bytes(own) + max(map(self._coming_bytes, own), default=0))

    def records_bytes(self, subs: Subs) -> int:
        """Bytes that the records of these take on the device, without masters that are the shard itself."""
        return sum(map(self._record_bytes, subs))

    def _record_bytes(self, owned: OwnedSubGroup) -> int:
        group, master = owned.group, owned.sub.kept.master
        shard_serves = group.dtype is master.dtype and group.placement.params == "device"
        apart = 0 if shard_serves else master.numel() * master.element_size()
        return apart + self._optimizer.moments_bytes(owned)

    def _is_whole(self, have: GroupGradients, near: set[OwnedSubGroup]) -> bool:
        """Whether all of a group is in `near`, so that its gradient stays on the device."""
        return all(owned in near for owned in self._optimizer.owned[have.group])

    def _growth(self, now: Subs, then: Subs) -> int:
        """How many more bytes of the device the update takes with the records of `then` there than with those
        of `now`."""

        def more(bytes_of: Callable[[OwnedSubGroup], int], served: bool) -> int:
            return max(0, _most(bytes_of, then, served) - _most(bytes_of, now, served))

        own = self._own_bytes(_unserved(then)) - self._own_bytes(_unserved(now))
        came = max(more(self._coming_bytes, served) for served in (True, False))
        return own + came + more(self._scratch_bytes, served=True)

    def _own_bytes(self, own: Subs) -> int:
        """Bytes that optimizers that step themselves take, for all of their records at once."""
        return self._optimizer.step_bytes(own) + self._temporaries.own(_numel(own), self._together(own))

    def _together(self, own: Subs) -> dict[int, int]:
        """By index, the elements of the param_groups that no sub-group but `own` has pieces of."""
        mine = set(own)
        far = {p.param_group for o in _unserved(self._optimizer.subs) if o not in mine for p in o.pieces}
        sizes: dict[int, int] = {}
        for piece in [piece for owned in own for piece in owned.pieces if piece.param_group not in far]:
            sizes[piece.param_group] = sizes.get(piece.param_group, 0) + piece.parameter.numel()
        return sizes

    def _coming_bytes(self, owned: OwnedSubGroup) -> int:
        """Bytes of the gradient that is copied from the host when a record on the device is stepped: only
        where the group is in several tiers."""
        have = self._gradients[owned.group]
        parts = len(self._optimizer.owned[owned.group]) > 1
        return have.slice_bytes * owned.sub.numel // owned.group.layout.shard_numel if parts else 0

    def _scratch_bytes(self, owned: OwnedSubGroup) -> int:
        return self._temporaries.kernels(self._at_once(owned))

    def _at_once(self, owned: OwnedSubGroup) -> int:
        """Elements of the sub-group that a kernel works on at once."""
        return min(owned.sub.numel, self._chunk)


def _levels(report: MemoryReport, scratch: int) -> dict[int, int]:
    """The highest points of a step, by which of the gradients were away at that time. scratch: bytes that the
    update takes in addition."""
    levels: dict[int, int] = {}
    for sample in report.samples:
        peak = sample.peak + (scratch if sample.phase == "step" else 0)
        levels[sample.away] = max(peak, levels.get(sample.away, 0))
    return levels


def _unserved(subs: Iterable[OwnedSubGroup]) -> list[OwnedSubGroup]:
    """Those that the user's optimizer steps itself."""
    return [owned for owned in subs if owned.rule is None]


def _numel(subs: Subs) -> int:
    return sum(owned.numel for owned in subs)


def _most(bytes_of: Callable[[OwnedSubGroup], int], subs: Subs, served: bool) -> int:
    return max((bytes_of(owned) for owned in subs if (owned.rule is not None) == served), default=0)
