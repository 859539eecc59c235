"""What the operations in a graph do to the engine's units and gradients.

A gather in a graph holds its unit as a forward does in the eager engine, so both serve one another: a unit
that a `zero.gathered` block holds is not gathered again, and not dropped when the graph is done with it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from zero.errors import UsageError
from zero.flat_group import FlatGroup
from zero.sharded_unit import ShardedUnit, State

Receive = Callable[[FlatGroup, int, Tensor], None]
Close = Callable[[ShardedUnit], None]
Mark = Callable[[str], None]

_runtimes: WeakValueDictionary[int, Runtime] = WeakValueDictionary()
_handles = itertools.count(1)


class Runtime:
    """One engine's end of the operations; numbers are those of `facts.Facts`.

    receive(group, slot, gradient): takes the gradient of one parameter. close(unit): no further gradient of
    the unit will come. mark(name): told when a unit is used and when it is done. peak: most bytes of whole
    units at one time in a graph, since `reset_peak`.
    """

    def __init__(self, units: Sequence[ShardedUnit], receive: Receive, close: Close, mark: Mark) -> None:
        self.handle = next(_handles)
        self.peak = 0
        self._units = tuple(units)
        self._slots = [(u, g, i) for u in units for g in u.groups for i in range(len(g.parameters))]
        self._receive = receive
        self._close = close
        self._mark = mark
        self._held: Counter[ShardedUnit] = Counter()
        self._whole: dict[tuple[ShardedUnit, torch.dtype | None], int] = {}
        _runtimes[self.handle] = self

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """By number."""
        return [group.parameters[slot] for _, group, slot in self._slots]

    def begin_gather(self, unit: int, dtype: torch.dtype) -> None:
        """Nothing waits. dtype: what fp32 parameters travel in."""
        cast = _cast(dtype)
        self._count(self._units[unit], cast)
        self._units[unit].start_gather(cast)

    def gather(self, numbers: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        """Whole values of parameters of one unit; it stays gathered until as many `release`."""
        unit, cast = self._slots[numbers[0]][0], _cast(dtype)
        unit.holds += 1
        self._held[unit] += 1
        self._count(unit, cast)
        unit.complete(cast)
        self._mark(unit.name)
        return [self._slots[n][1].values(cast)[self._slots[n][2]] for n in numbers]

    def release(self, unit: int, keep: bool) -> None:
        """End one `gather`. keep: the bytes may stay, the backward will want them first."""
        held = self._units[unit]
        held.holds -= 1
        self._held[held] -= 1
        self._mark(held.name)
        if not keep:
            held.release()
            self._forget_released()

    def reduce(self, number: int, gradient: Tensor, last: bool) -> None:
        """Take the gradient of a parameter. last: no other one of its unit comes from this graph."""
        unit, group, slot = self._slots[number]
        self._receive(group, slot, gradient)
        if last:
            self._close(unit)

    def begin(self) -> None:
        """A forward starts. What a failed backward still held has been dropped by the engine."""
        self._held.clear()
        self._forget_released()

    def abandon(self) -> None:
        """Let go of everything that a graph held when it failed."""
        for unit, count in self._held.items():
            unit.holds -= count
            unit.release()
        self.begin()

    def reset_peak(self) -> None:
        self._forget_released()
        self.peak = sum(self._whole.values())

    def _count(self, unit: ShardedUnit, cast: torch.dtype | None) -> None:
        self._forget_released()
        if not unit.resident:
            self._whole[unit, cast] = sum(group.buffer(cast).nbytes for group in unit.groups)
            self.peak = max(self.peak, sum(self._whole.values()))

    def _forget_released(self) -> None:
        self._whole = {k: n for k, n in self._whole.items() if k[0].state(k[1]) is not State.SHARDED}


def _cast(dtype: torch.dtype) -> torch.dtype | None:
    """The cast of a unit whose fp32 parameters travel in `dtype`."""
    return None if dtype is torch.float32 else dtype


def lookup(handle: int) -> Runtime:
    """The runtime behind a graph's handle. Raises UsageError where its engine is gone."""
    runtime = _runtimes.get(handle)
    if runtime is None:
        raise UsageError("a compiled graph outlived its engine; build the engine anew")
    return runtime
