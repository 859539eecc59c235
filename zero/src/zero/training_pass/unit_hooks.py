"""The hooks on a unit's modules, which decide when it is gathered and released.

forward     before: gather; after: release, unless backward needs the unit again at once.
backward    begins when a gradient reaches an output of the unit's forward: gather. It is over when autograd
            comes to a node older than that forward (`progress`), because the gradient of an input is ready.
            A leaf (which reentrant checkpointing passes in) has no producer whose turn could come, so a view
            of it goes into the forward instead; likewise a view of an input comes out if nothing else does. A
            call that nothing is older than (the first module) is over when all parameters have their
            gradients, if none is frozen and the modules have no parameters of other units, whose gradients
            may still pass through this unit's; otherwise it is over with the whole backward.

Recomputation under activation checkpointing is a forward inside a backward: it keeps the unit gathered. So
does a backward that will itself be differentiated.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, MutableSet, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from zero.sharding import autocast
from zero.sharding.alterations import changed_since
from zero.sharding.gather_format import GatherFormat
from zero.sharding.guard import UNIT_ATTRIBUTE
from zero.sharding.phase import Phase
from zero.sharding.sharded_unit import FOR_PARTS, Keep, ShardedUnit, State
from zero.sharding.tensors import iter_tensors, map_tensors, with_inner
from zero.sharding.uncopied import Uncopied
from zero.tiers.apart import apart
from zero.tiers.tracer import Tracer
from zero.training_pass import parametrized
from zero.training_pass.call_order import CallOrder
from zero.training_pass.progress import Progress
from zero.training_pass.schedule import Schedule
from zero.training_pass.turn import Turn
from zero.training_pass.under_way import calls_under_way, modules_called
from zero.training_pass.unit_call import Call, with_producers


class UnitHooks(Uncopied):
    """Hooks of one unit on its `hooked_modules`, whose forward needs its parameters.

    progress: of the engine's backwards. order: of all units' calls. tracer: told when the unit's use begins
    and ends. on_over(unit): called when the backward of the unit's calls is over and none is still to come.
    """

    def __init__(
        self,
        unit: ShardedUnit,
        schedule: Schedule,
        phase: Phase,
        progress: Progress,
        order: CallOrder,
        device_type: str,
        tracer: Tracer,
        called: MutableSet[nn.Module],
        on_over: Callable[[ShardedUnit], None],
    ) -> None:
        self._unit = unit
        self._schedule = schedule
        self._phase = phase
        self._progress = progress
        self._order = order
        self._device_type = device_type
        self._tracer = tracer
        self._depth = 0  # hooked modules being called, nested
        self._call: Call | None = None
        self._calls: weakref.WeakSet[Call] = weakref.WeakSet()  # whose outputs still exist
        self._ahead: set[Turn] = set()  # whose backward may come, or is under way
        self._over: list[Turn] = []  # whose backward is over, in the backward under way
        self._open_ended = False  # there was a call whose backward ends only with the whole one
        self._in_order: Turn | None = None  # of the call under way, if it is one in `order`
        own = {parameter for group in unit.groups for parameter in group.parameters}
        within = dict.fromkeys(p for hooked in unit.hooked_modules for p in hooked.parameters())
        self._own, self._others = own, [parameter for parameter in within if parameter not in own]
        self._on_over = on_over
        self._enter, self._leave = _untraced()
        self._hooked: MutableSet[nn.Module] = weakref.WeakSet()
        self._called = called
        for module in unit.hooked_modules:
            self._hook(module)
        parametrized.watch()
        known = _OwnUnit(self)
        for parameter in own:
            parameter.__dict__[UNIT_ATTRIBUTE] = known

    def _hook(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True)
        module.register_forward_hook(self._after, always_call=True)
        self._hooked.add(module)
        self._called.add(module)

    def reset(self) -> None:
        """Forget calls under way, after a backward or an exception."""
        self.leave_forward()
        for turn in (*self._ahead, *self._over):
            if turn.taken:
                turn.forget_graph()
        self.forget_progress()
        self._open_ended = False

    def leave_forward(self) -> None:
        """End all forwards under way. Calls that wait for their backward stay."""
        self._depth = 0
        self._call = self._in_order = None
        self._unit.forwards = 0

    def forget_progress(self) -> None:
        """Forget calls in backward: none is under way."""
        self._ahead.clear()
        self._over.clear()

    def expect(self) -> None:
        """Expect the calls that are part of the graph that autograd enters."""
        for call in self._calls:
            if call.turn not in self._ahead and call.is_in_graph():
                self._put_ahead(call.turn)

    def _put_ahead(self, turn: Turn) -> None:
        turn.taken = True
        self._ahead.add(turn)
        self._progress.expect(turn)

    def await_turn(self, turn: Turn) -> None:
        """Note that the backward may come to a call; `order` tells when."""
        turn.task = self._order.task
        self._ahead.add(turn)

    def is_current(self, turn: Turn) -> bool:
        """Return whether the weights are still those of the forward."""
        return turn.changes == self._unit.changes

    def gradient_arrived(self) -> None:
        """Note that a parameter has a gradient.

        Calls that an outer backward began do not end with the gradients of a backward that runs inside it
        (reentrant checkpointing): more may come from the outer one.
        """
        task = torch._C._current_graph_task_id()
        for turn in self._in_backward():
            if turn.task < task:
                turn.ends_with_gradients = False

    def gradients_complete(self) -> None:
        """Note that every trainable parameter has its gradient.

        Ends the calls whose end no input reports, unless gradients may still pass through frozen parameters
        or go to those of other units.
        """
        if any(p.requires_grad for p in self._others) or not all(p.requires_grad for p in self._own):
            return
        open_ended = {
            turn for turn in self._in_backward() if turn.ends_with_gradients and turn.newest_input < 0
        }
        self._unit.calls_in_backward -= open_ended
        if open_ended:  # else its user releases it: a call at its end, or a graph
            self._unit.release()

    def _in_backward(self) -> Iterator[Turn]:
        """The calls among the unit's in backward; the others are graphs'."""
        return (turn for turn in self._unit.calls_in_backward if isinstance(turn, Turn))

    def _before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any] | None:
        return None if self._phase.in_graph else self._enter(self, (args, kwargs))

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return None if self._phase.in_graph else self._leave(self, output)

    def _gather_before(self, inputs: tuple[Any, Any]) -> tuple[Any, Any]:
        """Gather the unit; return the inputs for its forward."""
        self._depth += 1
        self._unit.forwards += 1
        if self._depth > 1:
            return inputs
        if Keep.READ in self._unit.kept and calls_under_way(self._hooked) == 1:
            self._unit.kept.discard(Keep.READ)  # what it was kept for is over
        fmt = self._unit.format_for(autocast.enabled_dtype(self._device_type))
        with apart():
            self._acquire(fmt)
            self._unit.begin_compute()
            self._mark()
        self._call = self._in_order = None
        if torch.is_grad_enabled():
            self._unit.computed_in = fmt
            turn = self._take_turn(fmt)
            inputs, produced = with_producers(inputs)
            self._call = Call(turn, produced, recomputed=self._phase.in_backward)
            if not produced:
                turn.ends_with_gradients = not any(t.requires_grad for t in with_inner(iter_tensors(inputs)))
            for tensor in produced:
                self._progress.watch(tensor)
        return inputs

    def _take_turn(self, fmt: GatherFormat) -> Turn:
        """Return a turn for a call that begins, in `order` if all ranks make the call and gather for it.

        In a block of `zero.gathered`, one rank may make it alone. In a backward, calls are made again.
        """
        turn = Turn(self, self._unit, fmt)
        if not (self._unit.resident or self._unit.held_exact or torch._C._current_graph_task_id() >= 0):
            self._in_order = turn
            self._order.enter(turn)
        return turn

    def lend(self) -> bool:
        """Gather the unit for a module inside it that is called by another way than through the unit.

        From then on the module has hooks of its own, as the unit has. They are too late for this first call,
        so that the unit stays gathered after it; see `Keep`. Collective, as every call of a module is.
        Returns whether there is such a call.
        """
        part = self._part_being_called()
        if part is None:
            return False
        self._hook(part)
        with apart():
            self._unit.gather_to_keep(Keep.LENT if torch.is_grad_enabled() else Keep.READ)
        if torch.is_grad_enabled():
            self._open_ended = True
            self._unit.computed_in = self._unit.format_for(None)
            self._take_turn(self._unit.computed_in)
            self._leave_order()
        self._mark()
        return True

    def _part_being_called(self) -> nn.Module | None:
        """Return the outermost module inside the unit that is called past it, and has no hooks yet."""
        if self._unit.resident or self._phase.in_graph:  # resident: it is away
            return None
        inside = {module for hooked in self._unit.hooked_modules for module in hooked.modules()}
        part = next((module for module in modules_called() if module in inside), None)
        return None if part in self._hooked else part

    def _mark(self) -> None:
        self._tracer.mark(self._phase.name, self._unit.name)

    def _acquire(self, fmt: GatherFormat) -> None:
        """Gather the unit.

        A unit that is recomputed during its backward is gathered already, and this use is not part of the
        order that `schedule` learns: ranks that have used nothing of the unit do not recompute it.
        """
        used = self._unit.calls_in_backward or self._unit.kept - FOR_PARTS
        again = used and self._unit.state(fmt) is State.GATHERED
        self._unit.gather(fmt)
        if not again:
            self._schedule.follow(self._unit, fmt)

    def _release_after(self, output: Any) -> Any:
        """Release the unit, if possible; return the output of its forward."""
        if self._depth == 0:
            return output  # an exception further out has reset it
        self._depth -= 1
        self._unit.forwards -= 1
        if self._depth:
            return output
        call, self._call = self._call, None
        with apart():
            self._mark()
            self._unit.end_compute()
        in_order = self._in_order is not None
        output, tensors = self._without_views(output, with_inner(iter_tensors(output)))
        made = [] if call is None else [tensor for tensor in tensors if call.has_made(tensor)]
        if call is not None and call.inputs and not made:
            output = call.placed_in_graph(output)
            made = [tensor for tensor in with_inner(iter_tensors(output)) if call.has_made(tensor)]
        if call is not None and made:
            self._watch(call, made)
        self._leave_order()
        soon = bool(made) if self._phase.in_backward else in_order and self._schedule.needed_soon(self._unit)
        if soon:
            self._unit.rest()
        else:
            with apart():
                self._unit.release()
        return output

    def _without_views(self, output: Any, tensors: list[Tensor]) -> tuple[Any, list[Tensor]]:
        """Copy what is a view of a parameter, so that the unit can go; return the output, and its tensors.

        The ranks could not know of one another which of them still have the unit.
        """
        if self._unit.held_exact or not self._unit.has_views_among(tensors):
            return output, tensors
        output = map_tensors(lambda t: t.clone() if self._unit.has_views_among([t]) else t, output)
        tensors = with_inner(iter_tensors(output))
        if self._unit.has_views_among(tensors):  # in what cannot be mapped
            self._unit.kept.add(Keep.VIEWED)
        return output, tensors

    def _leave_order(self) -> None:
        if self._in_order is not None:
            self._order.leave(self._in_order)
            self._in_order = None

    def _watch(self, call: Call, made: Sequence[Tensor]) -> None:
        """Watch for gradients of the outputs.

        A view that is changed in place gets another producer, made from its base's.
        """
        bases = [t._base for t in made if t._base is not None and call.has_made(t._base)]
        for tensor in (*made, *bases):
            self._progress.watch(tensor, call.begin, call.begins_at)
        self._calls.add(call)
        self._open_ended |= call.turn.newest_input < 0 and self._in_order is None
        call.outputs = [weakref.ref(tensor) for tensor in made]

    def begin_backward(self, turn: Turn) -> None:
        """Gather the unit: a gradient has reached an output of the call, on this rank or another."""
        if not self.is_current(turn):
            raise changed_since()
        if turn not in self._ahead:
            self._put_ahead(turn)
        turn.taken = True
        self._unit.computed_in = turn.fmt
        if turn not in self._unit.calls_in_backward:
            self._unit.calls_in_backward.add(turn)
            if torch.is_grad_enabled():  # create_graph=True: this backward's own backward needs it again
                self._unit.kept.add(Keep.DIFFERENTIATED)
            with apart():
                self._unit.gather(turn.fmt)
                self._schedule.follow(self._unit, turn.fmt)
                self._mark()

    def end_backward(self, turn: Turn) -> None:
        """Release the unit: autograd has come to a node older than the call."""
        began = turn in self._unit.calls_in_backward
        self._ahead.discard(turn)
        self._over.append(turn)
        self._unit.calls_in_backward.discard(turn)
        with apart():
            self._mark()
            if not (self._open_ended or any(map(self._order.takes, self._ahead))):
                self._on_over(self._unit)
            if began:
                self._unit.release()


@cache
def _untraced() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """What gathers before and releases after a forward, for dynamo to leave alone.

    Not as decorators: dynamo takes seconds to import, and only engines need it.
    """
    return torch.compiler.disable(UnitHooks._gather_before), torch.compiler.disable(UnitHooks._release_after)


class _OwnUnit(Uncopied):
    """What a parameter knows of its unit, without keeping the engine alive; see `guard.OwnUnit`."""

    def __init__(self, hooks: UnitHooks) -> None:
        self._hooks = weakref.ref(hooks)

    def lend(self) -> bool:
        hooks = self._hooks()
        return hooks is not None and hooks.lend()

    def set_to_itself(self, parameter: nn.Parameter) -> None:
        hooks = self._hooks()
        if hooks is not None:
            hooks._unit.guard.set_to_itself(parameter)
