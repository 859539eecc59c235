"""What a step takes of the device besides state and gradients, learned from steps."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from zero.memory.memory_report import MemoryReport
from zero.optimizer.group_step import SCRATCH

GUESS = 4 * SCRATCH  # bytes per element, before any was stepped on the device


class Temporaries:
    """Bytes by what is stepped on the device: `kernels` by the elements that a kernel works on at once,
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
        if (found := _unserved_turn(report)) is not None:
            self._seen.pop(numel, None)
            self._seen[numel] = found
            self._together.update(together)


def _unserved_turn(report: MemoryReport) -> int | None:
    """Bytes that optimizers that step themselves took; None if there were none."""
    return next((nbytes for unit, nbytes in _turns(report) if not unit), None)


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
