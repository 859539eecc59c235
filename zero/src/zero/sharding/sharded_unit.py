"""A unit's life cycle: SHARDED -> GATHERING -> GATHERED -> SHARDED, once for each format it is needed in.

A unit is gathered in a `GatherFormat`: in the parameters' own dtypes, or an autocast dtype for fp32 groups,
exact or through 8 bits. Nearly always one is alive. There may be two if forwards under different autocast
settings await one backward, because autograd has saved views of both buffers, or if `zero.gathered` shows
exact values of a unit that computes with others.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import InitVar, dataclass
from enum import Enum
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from zero.communication.communicator import Communicator
from zero.ranges import ranged
from zero.sharding.alterations import replaced, written
from zero.sharding.flat_group import FlatGroup, Pending
from zero.sharding.forms import as_parameter, twins_of
from zero.sharding.gather_format import EXACT, GatherFormat
from zero.sharding.parameter_guard import ParameterGuard
from zero.sharding.units import UnitPlan


class Keep(Enum):
    """Why a unit stays gathered beyond its forwards and backwards, and until when."""

    VIEWED = "an output that cannot be copied is a view of a parameter; until the model's next forward"
    DIFFERENTIATED = "its backward is part of a graph, create_graph=True; until that graph's backward is over"
    PART_CALLED = "a module inside was called past the unit; until the optimizer step's last backward is over"
    PART_READ = "likewise, without gradients; until the next forward of the model or of such a module"


FOR_PARTS = frozenset({Keep.PART_CALLED, Keep.PART_READ})


class State(Enum):
    """What is held in each state, in bytes per rank, for a buffer of B bytes over W ranks.

    If the ranks have common memory, all of them together hold B in every state.
    """

    SHARDED = "B/W: the shard"
    GATHERING = "B/W + B: the shard, and the whole buffer being filled"
    GATHERED = "B/W + B: the shard, and the whole buffer with the parameters as its views"


@dataclass(eq=False, repr=False)
class ShardedUnit:
    """The flat groups that are gathered and released together.

    resident: the parameters are always whole (stages 0 to 2, one rank, persistent units).
    forwards: number of forwards under way that need the unit gathered. calls_in_backward: forward calls whose
    backward has begun and is not over. kept: what else needs it.
    wrappers: parameters that have their values in those of the groups (see `forms`).
    computed_in: the format of the last call that a backward has come to or, until one does, of the last
    forward with gradients. persistent: formats whose buffers `release` keeps until the weights change.
    changes: how often the weights have changed, for backwards to find out that their forward had others.
    """

    index: int
    plan: InitVar[UnitPlan]
    groups: tuple[FlatGroup, ...]
    communicator: Communicator
    resident: bool

    def __post_init__(self, plan: UnitPlan) -> None:
        self.name = plan.name
        self._hooked_modules = tuple(map(weakref.ref, plan.hooked_modules))  # see `lifetime`
        self.forwards = 0
        self.calls_in_backward: set[Any] = set()
        self.kept: set[Keep] = set()
        self.computed_in = EXACT
        self.persistent: set[GatherFormat] = set()
        self.changes = 0
        self.wrappers = tuple(parameter for _, parameter in plan.wrappers)
        mine = [p for group in self.groups for p in group.parameters]
        twins = [as_parameter(twin) for p in mine for twin in twins_of(p)]
        pairs = [pair for group in self.groups for pair in zip(group.parameters, group.local, strict=True)]
        local = [inner for parameter, inner in pairs if inner is not parameter]
        self.guard = ParameterGuard(mine, (*self.wrappers, *twins, *local))
        self._pending: dict[GatherFormat, list[list[Pending]]] = {}  # one list for each group that has begun
        self._gathered: set[GatherFormat] = set()
        self._stale = False  # the weights changed: nothing gathered before may stay
        self._bound = EXACT  # the format whose buffers the parameters are views of
        # What was bound before the `hold_exact` blocks under way.
        self._bound_before_exact: list[GatherFormat] = []
        quantised = (group.gather_options.quant_dtype for group in self.groups)
        self._quant_dtype = next(filter(None, quantised), None)

    @property
    def hooked_modules(self) -> tuple[nn.Module, ...]:
        """The modules whose forward needs the parameters, as far as the model still has them."""
        return tuple(module for found in self._hooked_modules if (module := found()) is not None)

    @property
    def common(self) -> bool:
        """Whether this rank's shard is part of memory that other ranks read."""
        return any(group.home.common for group in self.groups)

    @property
    def held_exact(self) -> bool:
        """Whether the unit is inside `hold_exact`."""
        return bool(self._bound_before_exact)

    @property
    def held(self) -> bool:
        """Whether a forward or a `hold_exact` block is under way, which needs the unit gathered."""
        return bool(self.forwards or self.held_exact)

    @property
    def in_use(self) -> bool:
        return bool(self.forwards or self._bound_before_exact or self.calls_in_backward or self.kept)

    def has_views_among(self, tensors: Iterable[Tensor]) -> bool:
        """Return whether one of `tensors` lies in parameter memory that a release would drop."""
        if self.resident:
            return False
        buffers = {group.local[0].untyped_storage().data_ptr() for group in self.groups} - {0}
        return any(_memory_of(tensor) in buffers for tensor in tensors)

    def forget_calls(self, keep: Iterable[Keep] = ()) -> None:
        """Forget calls in backward, none of which is expected to go on, and reasons in `kept` but `keep`."""
        self.calls_in_backward.clear()
        if self.kept:
            self.kept.intersection_update(keep)

    def state(self, fmt: GatherFormat = EXACT) -> State:
        if self.resident or fmt in self._gathered:
            return State.GATHERED
        return State.GATHERING if fmt in self._pending else State.SHARDED

    @property
    def idle(self) -> bool:
        """Whether nothing is gathered or being gathered."""
        return not (self._pending or self._gathered)

    def format_for(self, dtype: torch.dtype | None, all: bool = False) -> GatherFormat:
        """Return the format to compute in when autocast casts to `dtype` (None: it is off).

        all: every fp32 parameter is wanted in `dtype`. A unit that is held exact also computes with exact
        values.
        """
        narrow = None
        if dtype not in (None, torch.float32):
            wide = [group for group in self.groups if group.dtype is torch.float32]
            narrow = dtype if any(all or group.gather_options.narrows for group in wide) else None
        return GatherFormat(
            narrow, None if self.held_exact else self._quant_dtype, all and narrow is not None
        )

    def start_gather(self, fmt: GatherFormat) -> None:
        """Begin the gather unless it is done or under way.

        If a failure cut an earlier start short, begin the groups that are missing.
        """
        if self.resident or fmt in self._gathered:
            return
        begun = self._pending.setdefault(fmt, [])
        if len(begun) == len(self.groups):
            return
        with ranged("gather", self.name):
            for group in self.groups[len(begun) :]:
                shared = self._shared(group, len(begun), fmt)
                begun.append(group.start_gather(self.communicator, fmt) if shared is None else shared)

    def _shared(self, group: FlatGroup, index: int, fmt: GatherFormat) -> list[Pending] | None:
        """Return what was begun for another format that is the same for the group; None if nothing was.

        There is one buffer for each.
        """
        if len(self._pending) == 1 and not self._gathered:
            return None
        alike = group.gather_format(fmt)
        for other, begun in self._pending.items():
            if len(begun) > index and group.gather_format(other) == alike:
                return begun[index]
        there = any(group.gather_format(other) == alike for other in self._gathered)
        return [] if there and not self._stale else None

    def gather(self, fmt: GatherFormat, bind: bool = True) -> None:
        """Make the unit whole in `fmt`: begin the gather unless that was done before, and wait for it.

        bind: make the parameters views of the values; a graph takes `FlatGroup.values` instead.
        """
        if self.resident:
            return
        if fmt not in self._gathered:
            self.start_gather(fmt)
            self._finish(fmt)
        if bind:
            self.guard.open()
            self._bind(fmt)

    def _finish(self, fmt: GatherFormat) -> None:
        with ranged("wait", self.name):
            for handle in chain.from_iterable(self._pending[fmt]):
                handle.wait()
            for group in self.groups:
                group.finish_gather(fmt)
        del self._pending[fmt]
        self._gathered.add(fmt)

    def renew(self) -> None:
        """Refill gathered buffers after weights were written in a `hold_exact` block. Collective.

        Forwards and backwards under way continue with the new weights, once every rank has written.
        """
        self.begin_compute()
        under_way = self.forwards or self.calls_in_backward
        if under_way or self.kept:
            for fmt in tuple(self._pending):
                self._finish(fmt)
            for fmt in sorted(self._gathered, key=str):
                self._pending[fmt] = [group.start_gather(self.communicator, fmt) for group in self.groups]
                self._finish(fmt)
        if not under_way:
            self.changes += 1

    def begin_compute(self) -> None:
        """Note that a forward begins to compute: the parameters must not change until `end_compute`."""
        if not self.resident:
            self.guard.begin_compute()

    def end_compute(self) -> None:
        """Release the unit and raise ModelError if the forward changed a parameter: the change would be lost.

        Does nothing inside `hold_exact`, whose end looks for changes itself.
        """
        changed = self.guard.end_compute()
        if self.resident or self.held_exact or changed is None:  # None: the gather has failed
            return
        rebound = self.rebind()
        if rebound or changed:
            self.release()
            names = list(chain.from_iterable(group.names for group in self.groups))
            raise replaced(rebound) if rebound else written(names[changed[0]])

    def rebind(self, told: Callable[[FlatGroup, int], bool] = lambda group, index: True) -> list[str]:
        """Bind parameters again that were given other memory; return the names that `told` selects.

        A frozen parameter of a resident unit may keep its memory until its values are taken in.
        """
        groups = [group for group in self.groups if group.trainable or not self.resident]
        found = [(group, index) for group in groups for index in group.binding.moved_away()]
        names = [group.names[index] for group, index in found if told(group, index)]
        for group in dict.fromkeys(group for group, _ in found):
            group.binding.bind_again()
        return names

    def hold_exact(self) -> None:
        """Hold the unit, its parameters bound to exact values of this rank's own, until `unhold_exact`."""
        self._bound_before_exact.append(self._bound)
        self.gather(EXACT)
        for group in self.groups:
            group.isolate(self._bound_before_exact[-1])

    def gather_to_keep(self, why: Keep) -> None:
        """Gather the unit for the program to read; `Keep` says until when. Collective."""
        if not self.resident:
            self.kept.add(why)
            self.gather(self.format_for(None))

    def _bind_again(self) -> None:
        """Bind what the program reads, in `hold_exact` or in a part, once no forward computes with it."""
        if not self.forwards and (self.held_exact or self.kept & FOR_PARTS):
            readable = self.format_for(None)
            if readable in self._gathered:
                self._bind(readable)

    def unhold_exact(self) -> list[str]:
        """End `hold_exact` and bind what was bound before, for a forward that computes with the unit.

        The caller then releases the unit. Returns the names of parameters that were given other memory with
        other values, which are dropped.
        """
        before = self._bound_before_exact.pop()
        lost = [] if self.held_exact else self.rebind(told=lambda group, index: group.binding.differs(index))
        if not self.held_exact:
            for group in self.groups:
                group.rejoin(self._bound)
        if before in self._gathered:
            self._bind(before)
        return lost

    def release(self) -> None:
        """Drop every gathered buffer that is not persistent, unless the unit is in use."""
        if self.resident or self.idle:
            return
        if self.in_use:
            self._bind_again()
            return
        if self._pending and self.communicator.failed:
            return  # a transfer that cannot be waited for may still write to its buffer
        for begun in self._pending.values():
            for handle in chain.from_iterable(begun):
                handle.wait()
        with ranged("release", self.name):
            self._drop_buffers()
        self._bind(EXACT)
        self.guard.close()

    def _drop_buffers(self) -> None:
        stay = set() if self._stale else self.persistent & self._gathered
        for group in self.groups:
            staying = {group.gather_format(fmt) for fmt in stay}
            for fmt in (*self._pending, *self._gathered):
                if group.gather_format(fmt) not in staying:
                    group.release(fmt)
        self._pending.clear()
        self._gathered = stay
        self._stale = False

    def stay_gathered(self) -> None:
        """Stay gathered for a later use. Until then, a module inside that is called past the unit is seen."""
        if not (self.resident or self.in_use):
            self.guard.close()

    def invalidate(self) -> None:
        """Drop persistent buffers because the weights change: now, or when the last user is done."""
        self._stale = not self.idle
        self.release()
        self.take_back()

    def begin_write(self) -> None:
        """Prepare for a change of shards: drop what is gathered, await the device's reads of host shards."""
        self.invalidate()
        for group in self.groups:
            group.source.await_reads()

    @property
    def away(self) -> bool:
        """Whether shards are not on the device."""
        return any(not group.placement.params.near for group in self.groups)

    def bring(self) -> None:
        """Begin to move shards that are away to the device, for a gather, until `take_back`."""
        if self.idle:
            for group in self.groups:
                group.source.bring()

    def take_back(self) -> None:
        """Drop the device copies that `bring` made."""
        for group in self.groups:
            group.source.take_back()

    def finalize_shards(self) -> None:
        """Turn a freshly flattened unit resident, or SHARDED, where only shards remain."""
        for group in self.groups:
            group.finalize_shards(self.resident)
        if not self.resident:
            self.guard.close()

    def start_refill(self, frozen: bool) -> list[Pending]:
        """Begin what `refill` completes."""
        whole = [group for group in self.groups if self.resident and group.shards > 1]
        with ranged("gather", self.name):
            begun = [g.start_gather(self.communicator, EXACT) for g in whole if g.trainable or frozen]
        return list(chain.from_iterable(begun))

    def rebound(self) -> list[str]:
        """Return the names of trained parameters that are not views of the unit's memory, but should be."""
        trained = (group for group in self.groups if group.trainable and self.resident)
        return [group.names[index] for group in trained for index in group.binding.moved_away()]

    def replaced_frozen(self) -> list[tuple[FlatGroup, int]]:
        """Return the frozen parameters that a program has given other memory, and with it other values."""
        if not self.resident:
            return []  # checked when a forward or a `hold_exact` block ends
        groups = [group for group in self.groups if not group.trainable and group.home.materialized]
        return [(group, index) for group in groups for index in group.binding.moved_away()]

    def offload_state(self) -> None:
        """Give back the device's memory; see `Engine.offload_states`."""
        for group in self.groups:
            group.offload_state()
        self.guard.close()

    def reload_state(self) -> None:
        """End offload_state(): bring back this rank's shards. `refill` brings back a resident unit's whole
        values."""
        for group in self.groups:
            group.reload_state(whole=self.resident)

    def abandon(self) -> None:
        """Forget all users but `hold_exact` blocks, and release.

        For after an exception, or for a forward that never got its backward.
        """
        self.forwards = 0
        self.forget_calls()
        self.release()

    def _bind(self, fmt: GatherFormat) -> None:
        if fmt != self._bound:
            self.guard.open()
            for group in self.groups:
                group.bind(fmt)
            self._bound = fmt

    def conceal(self) -> None:
        """End `ParameterGuard.expose`."""
        self.guard.conceal(whole=self.resident or (self.in_use and self._bound in self._gathered))


def refill(units: Iterable[ShardedUnit], frozen: bool) -> None:
    """Fill the whole buffers of resident units from all ranks' shards. Collective.

    frozen: also those of frozen groups, whose values change only in a load or a reload.
    """
    for handle in list(chain.from_iterable(unit.start_refill(frozen) for unit in units)):
        handle.wait()


def _memory_of(tensor: Tensor) -> int:
    """Return the address of a tensor's storage; -1 if torch.func, a subclass or the layout gives it none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return -1
