"""What the operations in a graph do to the engine's units and gradients.

A gather in a graph holds its unit as a forward does in the eager engine, so both serve one another: a unit
that a `zero.gathered` block holds is not gathered again, and not dropped when the graph is done with it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from accelz import Accelerator, Memory
from zero.compiled.activations import Activations
from zero.compiled.pending_backwards import PendingBackwards
from zero.errors import UsageError
from zero.sharding.gather_format import EXACT, GatherFormat
from zero.sharding.sharded_unit import ShardedUnit, State
from zero.training_pass.training_pass import TrainingPass

Gathered = tuple[int, torch.dtype]
"""A unit, and what its fp32 parameters travel in."""

_runtimes: WeakValueDictionary[int, Runtime] = WeakValueDictionary()
_handles = itertools.count(1)


@dataclass
class Profile:
    """What graphs do in steps that are watched. gathers: how often. peak: the highest point of `memory`."""

    memory: Memory
    gathers: Counter[Gathered] = field(default_factory=Counter)
    peak: int = 0

    def sample(self) -> None:
        """Take the peak since somebody began it anew."""
        self.peak = max(self.peak, self.memory.stats().peak)


class Runtime:
    """One engine's end of the operations; numbers are those of `facts.Facts`.

    training_pass: told of gradients, and when a unit is used and when it is done. peak: most bytes of whole
    units at one time in a graph. profile: of the steps under way; None where nobody watches. activations:
    those that wait on the host. pending_backwards: of forwards that have run. record_streamer: of optimizer
    state. units: by index.
    """

    def __init__(self, accelerator: Accelerator, training_pass: TrainingPass) -> None:
        self.handle = next(_handles)
        self.peak = 0
        self.profile: Profile | None = None
        self.activations = Activations(accelerator)
        self.units = tuple(training_pass.units)
        self.pending_backwards = PendingBackwards(self.units, training_pass)
        self._slots = [(u, g, i) for u in self.units for g in u.groups for i in range(len(g.parameters))]
        self._pass = training_pass
        self._unseen = False
        self.record_streamer = training_pass.streamed_state
        self._held: Counter[ShardedUnit] = Counter()
        self._whole: dict[tuple[ShardedUnit, GatherFormat], int] = {}
        _runtimes[self.handle] = self

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters, by number."""
        return [group.parameters[slot] for _, group, slot in self._slots]

    def unit(self, what: Gathered) -> ShardedUnit:
        return self.units[what[0]]

    def parameters_of(self, unit: int) -> tuple[list[int], list[torch.nn.Parameter]]:
        """Numbers of a unit's parameters, and the parameters."""
        mine = [(n, g.parameters[i]) for n, (u, g, i) in enumerate(self._slots) if u is self.units[unit]]
        return [number for number, _ in mine], [parameter for _, parameter in mine]

    def nbytes(self, what: Gathered) -> int:
        """Bytes of whole buffers, beside those that ranks have in common."""
        unit = self.unit(what)
        fmt = unit.format_for(what[1], all=True)
        return sum(
            g.nbytes(fmt) for g in unit.groups if not (g.home.common and g.gather_format(fmt) == EXACT)
        )

    def begin_gather(self, unit: int, dtype: torch.dtype) -> None:
        """Begin to gather a unit; nothing waits. dtype: what fp32 parameters travel in."""
        fmt = self.units[unit].format_for(dtype, all=True)
        self._count(self.units[unit], fmt)
        self.units[unit].start_gather(fmt)

    def gather(self, numbers: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        """Whole values of parameters of one unit; it stays gathered until as many `release`."""
        unit = self._slots[numbers[0]][0]
        fmt = unit.format_for(dtype, all=True)
        unit.forwards += 1
        self._held[unit] += 1
        self._count(unit, fmt)
        unit.gather(fmt, bind=False)
        if self.profile is not None:
            self.profile.gathers[unit.index, dtype] += 1
        self._mark_use(unit)
        values = {group: group.values(fmt) for group in unit.groups}
        return [values[group][index] for _, group, index in (self._slots[n] for n in numbers)]

    def release(self, unit: int, keep: bool) -> None:
        """End one `gather`. keep: the bytes may stay, the backward will want them first."""
        held = self.units[unit]
        held.forwards -= 1
        self._held[held] -= 1
        self._mark_use(held)
        if not keep:
            held.release()
            self._forget_released()

    def reduce(self, number: int, gradient: Tensor, last: bool) -> None:
        """Take the gradient of a parameter. last: no other one of its unit comes from this graph."""
        unit, group, slot = self._slots[number]
        more = unit.resident and self.pending_backwards.more
        self._pass.receive_from_graph(group, slot, gradient, more)
        if last and not more:
            self._pass.close_in_graph(unit)

    def end_backward(self) -> None:
        """The graph's backward is over."""
        self.pending_backwards.more = False
        if self.profile is not None:
            self.profile.sample()

    def set_persistent(self, what: Gathered, persistent: bool) -> None:
        """Whether the unit stays gathered in this dtype from now on, until the weights change."""
        unit = self.unit(what)
        change = unit.persistent.add if persistent else unit.persistent.discard
        change(unit.format_for(what[1], all=True))

    def invalidate(self, units: Iterable[ShardedUnit]) -> None:
        """Drop units' whole values that nobody uses, also what persists."""
        for unit in units:
            unit.invalidate()
        self._forget_released()

    def begin(self) -> None:
        """A forward starts. What a failed backward still held has been dropped by the engine."""
        self._held.clear()
        self.pending_backwards.more = False
        self.activations.clear()
        self._forget_released()

    def abandon(self) -> None:
        """Let go of everything that a graph held when it failed."""
        for unit, count in self._held.items():
            unit.forwards -= count
            unit.release()
        self.record_streamer.return_all_to_host()
        self.begin()

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Nobody is told of units that come and go in the block."""
        before, self._unseen = self._unseen, True
        try:
            yield
        finally:
            self._unseen = before

    def _mark_use(self, unit: ShardedUnit) -> None:
        """A unit comes or goes; who is told may begin the device's peak anew."""
        if self.profile is not None:
            self.profile.sample()
        if not self._unseen:
            self._pass.mark(unit)

    def _count(self, unit: ShardedUnit, fmt: GatherFormat) -> None:
        self._forget_released()
        if not unit.resident:
            self._whole[unit, fmt] = sum(group.nbytes(fmt) for group in unit.groups)
            self.peak = max(self.peak, sum(self._whole.values()))

    def _forget_released(self) -> None:
        self._whole = {k: n for k, n in self._whole.items() if k[0].state(k[1]) is not State.SHARDED}


def lookup(handle: int) -> Runtime:
    """The runtime behind a graph's handle. Raises UsageError where its engine is gone."""
    runtime = _runtimes.get(handle)
    if runtime is None:
        raise UsageError("a compiled graph ran after its engine was freed; create a new engine")
    return runtime
