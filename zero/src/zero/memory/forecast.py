"""What a step will take of the device with other optimizer state there than when it was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

from zero.gradients.group_gradients import GroupGradients
from zero.gradients.reducer import GradientReducer
from zero.memory.memory_report import MemoryReport
from zero.optimizer.group_step import SCRATCH
from zero.optimizer.sharded_optimizer import ShardedOptimizer
from zero.optimizer.stepped import SteppedSubGroup
from zero.tiers.tier import ON_DEVICE

Subs = Sequence[SteppedSubGroup]
GUESS = 4 * SCRATCH  # bytes per element that a step takes besides state, before any was stepped on the device


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
        peaks = (peak + sum(size for bit, size in slices if away & bit) for away, peak in levels.items())
        return self.records_bytes(come) - self.records_bytes(gone) + max(peaks)

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
        group, master = stepped.group, stepped.record.columns[0]
        serves = group.placement.shard_serves(group.dtype.itemsize, ON_DEVICE)
        apart = 0 if serves else master.numel() * master.element_size()
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


class Temporaries:
    """What a step takes of the device besides state and gradients, learned from steps.

    Bytes by what is stepped on the device: `kernels` by the elements that a kernel works on at once,
    `unserved` by all elements that optimizers step themselves.

    Some of these optimizers work through their parameters one by one, others on all of them together. So what
    they take is assumed to grow as it did between the last two steps seen. torch's optimizers change from one
    by one to all together (foreach) where all parameters of a param_group are on the device: what that takes
    is seen when they are, and guessed until then.
    """

    def __init__(self) -> None:
        self._rate: float = GUESS
        self._seen: dict[int, int] = {}
        self._together: set[int] = set()

    def kernels(self, numel: int) -> int:
        """Bytes for a kernel that works on `numel` elements at once."""
        return round(self._rate * numel)

    def learn_kernels(self, numel: int, came: int, report: MemoryReport) -> None:
        """Learn from a step in which kernels stepped only one record on the device. came: bytes of its
        gradient that were copied there."""
        if found := _kernel_turns(report):
            self._rate = max(0, max(found) - came) / numel

    def unserved(self, numel: int, together: Mapping[int, int]) -> int:
        """Bytes for optimizers that step `numel` elements themselves. together: by index, the elements of
        param_groups that are all on the device."""
        *others, (last, nbytes) = self._seen.items() or [(0, 0)]
        slope: float = GUESS
        if others:
            before, less = others[-1]
            slope = max(0.0, (nbytes - less) / (last - before))
        grown = max(0, nbytes + round(slope * (numel - last)))
        unseen = max((count for group, count in together.items() if group not in self._together), default=0)
        return max(grown, GUESS * unseen)

    def learn_unserved(self, numel: int, together: Mapping[int, int], report: MemoryReport) -> None:
        """Learn from a measured step in which optimizers stepped `numel` elements themselves."""
        found = next((nbytes for unit, nbytes in _turns(report) if not unit), None)
        if found is not None:
            self._seen.pop(numel, None)
            self._seen[numel] = found
            self._together.update(together)


def _kernel_turns(report: MemoryReport) -> list[int]:
    """Bytes that each sub-group took that a kernel stepped; these come after all others."""
    turns = _turns(report)
    behind = next((n + 1 for n, (unit, _) in enumerate(turns) if not unit), 0)
    return [nbytes for _, nbytes in turns[behind:]]


def _turns(report: MemoryReport) -> list[tuple[str, int]]:
    """For each point of the update, between its beginning and its end: the unit, and the bytes that were
    taken and given back since the point before. Memory that others give back meanwhile, as Python's collector
    may, does not make them fewer.
    """
    step = [sample for sample in report.samples if sample.phase == "step"]
    return [
        (now.unit, now.peak - min(before.allocated, now.allocated)) for before, now in pairwise(step[:-1])
    ]
