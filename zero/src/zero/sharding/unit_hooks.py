"""When a unit is gathered and released: the hooks on its modules.

forward     before: gather; after: release, unless backward needs the unit again at once.
backward    begins when a gradient reaches an output of the unit's forward: gather. It is over when the
            gradient of the forward's newest input is ready: autograd runs nodes newest first, so every
            node made after that input has run by then. A leaf (what reentrant checkpointing hands in) is
            older than anything: a view of it goes into the forward instead. A call without such an input
            (the first module) is over when all parameters have their gradients, if none is frozen and no
            others lie within, whose gradients may yet come through the unit's; or with the whole backward.

Recomputation under activation checkpointing is a forward inside a backward: it keeps the unit gathered. So do
an output that is a view of a parameter, and a backward that is to be differentiated itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zero.errors import UsageError
from zero.sharding import autocast
from zero.sharding.cast import Cast
from zero.sharding.copies import Uncopied
from zero.sharding.schedule import Schedule
from zero.sharding.sharded_unit import DIFFERENTIATED, VIEWED, ShardedUnit, State
from zero.sharding.tensors import iter_tensors


@dataclass
class Phase:
    """What the engine is doing. in_backward: inside Engine.backward. in_graph: inside a compiled forward of
    the whole model, which gathers for itself. on_unit: told the name of each unit when it is used and when it
    is done; None where nobody wants to know."""

    in_backward: bool = False
    in_graph: bool = False
    on_unit: Callable[[str], None] | None = None

    def mark(self, unit: str) -> None:
        if self.on_unit is not None:
            self.on_unit(unit)


class UnitHooks(Uncopied):
    """Hooks of one unit on its anchors (modules whose forward needs its parameters).

    on_over(unit): called when the backward of its calls is over, and none is to come.
    """

    def __init__(
        self,
        unit: ShardedUnit,
        schedule: Schedule,
        phase: Phase,
        device_type: str,
        on_over: Callable[[ShardedUnit], None],
    ) -> None:
        self._unit = unit
        self._schedule = schedule
        self._phase = phase
        self._device_type = device_type
        self._depth = 0  # anchors being called, one inside another
        self._call: _Call | None = None
        # Calls whose backward may come: not of outputs that are gone.
        self._awaited: weakref.WeakSet[_Call] = weakref.WeakSet()
        own = {parameter for group in unit.groups for parameter in group.parameters}
        within = dict.fromkeys(p for anchor in unit.anchors for p in anchor.parameters())
        self._own, self._others = own, [parameter for parameter in within if parameter not in own]
        self._on_over = on_over
        # Here and not as decorators: dynamo takes seconds to import, which only engines need.
        self._enter = torch.compiler.disable(self._gather_before)
        self._leave = torch.compiler.disable(self._release_after)
        for anchor in unit.anchors:
            anchor.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True)
            anchor.register_forward_hook(self._after, always_call=True)

    def reset(self) -> None:
        """Forget calls under way: after a backward, or an exception."""
        self._depth = 0
        self._call = None
        self._awaited.clear()

    def gradient_arrived(self) -> None:
        """A parameter has a gradient. In a backward that runs in another (reentrant checkpointing) that says
        nothing of calls that the outer one has begun: more may follow from there."""
        task = torch._C._current_graph_task_id()
        for call in self._unit.calls_in_backward:
            if isinstance(call, _Call) and call.task < task:
                call.ends_with_gradients = False

    def gradients_complete(self) -> None:
        """Every trainable parameter has its gradient: calls that no input tells the end of are over, unless
        gradients may yet go through frozen parameters, or to those of other units."""
        if any(p.requires_grad for p in self._others) or not all(p.requires_grad for p in self._own):
            return
        calls = {call for call in self._unit.calls_in_backward if isinstance(call, _Call)}
        open_ended = {call for call in calls if call.ends_with_gradients and not call.has_input}
        self._unit.calls_in_backward -= open_ended
        if open_ended:  # else whoever gathered it releases it: a call at its end, or a graph
            self._unit.release()

    def _before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any] | None:
        return None if self._phase.in_graph else self._enter((args, kwargs))

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not self._phase.in_graph:
            self._leave(output)

    def _gather_before(self, inputs: tuple[Any, Any]) -> tuple[Any, Any]:
        """What goes into the forward."""
        self._depth += 1
        self._unit.holds += 1
        if self._depth > 1:
            return inputs
        cast = self._unit.cast_for(autocast.enabled_dtype(self._device_type))
        self._unit.computed_in = cast
        self._acquire(cast)
        self._phase.mark(self._unit.name)
        self._call = None
        if torch.is_grad_enabled():
            newest = _newest_input(inputs)
            if newest is None:
                inputs, newest = _with_view_of_leaf(inputs)
            self._call = _Call(self, cast, newest)
            if newest is not None:
                _when_ready(newest, partial(_end, weakref.ref(self._call)))
            else:
                self._call.ends_with_gradients = not any(t.requires_grad for t in iter_tensors(inputs))
        return inputs

    def _acquire(self, cast: Cast) -> None:
        """Gather; what is recomputed while its backward goes on is there, and nothing to learn an order from:
        ranks that have used nothing of the unit do not recompute it."""
        if self._unit.calls_in_backward and self._unit.state(cast) is State.GATHERED:
            self._unit.gather(cast)
        else:
            self._schedule.acquire(self._unit, cast)

    def _release_after(self, output: Any) -> None:
        if self._depth == 0:
            return  # reset by an exception further out
        self._depth -= 1
        self._unit.holds -= 1
        if self._depth:
            return
        self._phase.mark(self._unit.name)
        call, self._call = self._call, None
        outputs = list(iter_tensors(output))
        needed = call is not None and call.watch(outputs)
        if call is not None and needed and not self._phase.in_backward:
            self._awaited.add(call)
        if self._unit.shows_in(outputs):
            self._unit.calls_in_backward.add(VIEWED)
        if not (needed and (self._phase.in_backward or self._schedule.needed_soon(self._unit))):
            self._unit.release()

    def begin_backward(self, call: _Call) -> None:
        """A gradient has reached an output of the call."""
        if call not in self._unit.calls_in_backward:
            self._unit.calls_in_backward.add(call)
            if torch.is_grad_enabled():  # create_graph=True: this backward's own backward needs it again
                self._unit.calls_in_backward.add(DIFFERENTIATED)
            self._schedule.acquire(self._unit, call.cast)
            self._phase.mark(self._unit.name)

    def end_backward(self, call: _Call) -> None:
        """The gradient of the call's newest input is ready."""
        awaited, began = call in self._awaited, call in self._unit.calls_in_backward
        self._awaited.discard(call)
        self._unit.calls_in_backward.discard(call)
        self._phase.mark(self._unit.name)
        if (awaited or began) and not self._awaited:
            self._on_over(self._unit)
        if began:
            self._unit.release()


class _Call:
    """One forward call of a unit, as its backward will see it.

    Autograd's graph holds it by its outputs, where Python's collector does not see, and a model may keep an
    output of its own. So it does not hold the unit: a cycle would never be freed. Its input does not hold it:
    that may live on when the outputs are gone, and no backward comes any more.

    newest: the input whose gradient ends it.
    """

    def __init__(self, hooks: UnitHooks, cast: Cast, newest: Tensor | None) -> None:
        self.cast = cast
        self.has_input = newest is not None
        self._since = -1 if newest is None else _age(newest)
        self.task = -1  # autograd's, in which its backward began
        self.ends_with_gradients = True  # of the unit's parameters, where it has no input
        self._hooks = weakref.ref(hooks)

    def watch(self, outputs: Iterable[Tensor]) -> bool:
        """Hook the outputs that gradients can reach; whether there are any. What is older than the newest
        input, and passed on, has nothing of the call. That input itself may be all that comes out on this
        rank, while others gather."""
        tensors = [t for t in outputs if t.grad_fn is not None and _age(t) >= self._since]
        for tensor in tensors:
            _when_ready(tensor, self.begin)
        return bool(tensors)

    def begin(self) -> None:
        hooks = self._hooks()
        if hooks is None:
            raise UsageError("the model and its engine are gone: keep them until engine.backward(loss)")
        self.task = torch._C._current_graph_task_id()
        hooks.begin_backward(self)

    def end(self) -> None:
        hooks = self._hooks()
        if hooks is not None:  # else the input is somebody else's, and its gradient not of this call
            hooks.end_backward(self)


def _end(call: weakref.ref[_Call]) -> None:
    alive = call()
    if alive is not None:
        alive.end()


_CALLS = (
    "_zero_when_ready"  # on a tensor: its producer, and what to call when its gradient is ready, in order
)


def _when_ready(tensor: Tensor, call: Callable[[], None]) -> None:
    """Run `call` when the tensor's gradient is ready, before its producer's backward; the last one first.

    One unit's output is often the next unit's input: the later unit's backward must be over, its
    reduction issued and its bytes gone, before the earlier one is gathered. A tensor that was changed in
    place since has another producer.
    """
    producer, calls = tensor.__dict__.get(_CALLS, (None, None))
    if calls is None or producer is not tensor.grad_fn:
        calls = []
        tensor.__dict__[_CALLS] = tensor.grad_fn, calls
        tensor.register_hook(partial(_run, calls))
    calls.insert(0, call)


def _run(calls: list[Callable[[], None]], gradient: Tensor) -> None:
    for call in tuple(calls):
        call()


def _newest_input(inputs: Any) -> Tensor | None:
    """The input whose producer is the last one made; leaves have no producer."""
    return max((t for t in iter_tensors(inputs) if t.grad_fn is not None), key=_age, default=None)


def _age(tensor: Tensor) -> int:
    """The number of a tensor's producer: newer ones have larger."""
    assert tensor.grad_fn is not None
    return tensor.grad_fn._sequence_nr()


def _with_view_of_leaf(inputs: tuple[Any, Any]) -> tuple[tuple[Any, Any], Tensor | None]:
    """The inputs with a view in place of the first leaf among them that gradients go to, and that view, whose
    producer is as old as the call. Parameters stay what they are, and so do the caller's containers."""
    args, kwargs = inputs
    leaf = next(filter(_is_plain_leaf, (*args, *kwargs.values())), None)
    if leaf is None:
        return inputs, None
    view = leaf.view_as(leaf)
    viewed = tuple(view if value is leaf else value for value in args)
    return (viewed, {name: view if value is leaf else value for name, value in kwargs.items()}), view


def _is_plain_leaf(value: Any) -> bool:
    if not isinstance(value, Tensor) or isinstance(value, nn.Parameter):
        return False
    return value.is_leaf and value.requires_grad and value.layout is torch.strided and not value.is_nested
