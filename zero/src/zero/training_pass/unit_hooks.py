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
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.utils.parametrize import ParametrizationList

from zero.sharding import autocast
from zero.sharding.gather_format import GatherFormat
from zero.sharding.guard import UNIT_ATTRIBUTE
from zero.sharding.lifetime import Uncopied, UncopiedRef
from zero.sharding.sharded_unit import FOR_PARTS, Keep, State
from zero.sharding.tensors import iter_tensors, map_tensors, with_inner
from zero.tiers.apart import apart
from zero.training_pass.call import Call, CallEdges, next_number, with_producers
from zero.training_pass.training_pass import TrainingPass
from zero.training_pass.under_way import calls_under_way, modules_called
from zero.training_pass.unit_calls import UnitCalls


class UnitHooks(Uncopied):
    """Hooks of one unit on its `hooked_modules`, whose forward needs its parameters.

    Each of the parameters has a weak reference to this.
    """

    def __init__(self, calls: UnitCalls, training_pass: TrainingPass) -> None:
        self._calls = calls
        self.unit = calls.unit
        self._pass = training_pass
        self._gather_before, self._release_after = _untraced()
        self._hooked: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def register(self) -> None:
        """Register the hooks, which then hold this object."""
        for module in self.unit.hooked_modules:
            self._hook(module)
        _report_parametrizations()
        known = UncopiedRef(self)
        for parameter in (*self._calls.parameters, *self.unit.wrappers):
            parameter.__dict__[UNIT_ATTRIBUTE] = known

    def _hook(self, module: nn.Module) -> None:
        before = module.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True)
        self._pass.handles += [before, module.register_forward_hook(self._after, always_call=True)]
        self._hooked.add(module)
        self._pass.called.add(module)

    def _before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any] | None:
        return None if self._pass.in_graph else self._gather_before(self, (args, kwargs))

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return None if self._pass.in_graph else self._release_after(self, output)

    def _begin_call(self, inputs: tuple[Any, Any]) -> tuple[Any, Any]:
        """Gather the unit; return the inputs for its forward."""
        calls, unit = self._calls, self.unit
        calls.depth += 1
        unit.forwards += 1
        if calls.depth > 1:
            return inputs
        if Keep.PART_READ in unit.kept and calls_under_way(self._hooked) == 1:
            unit.kept.discard(Keep.PART_READ)  # what it was kept for is over
        fmt = unit.format_for(autocast.enabled_dtype(self._pass.device_type))
        with apart():
            self._acquire(fmt)
            unit.begin_compute()
            self._pass.mark(unit)
        calls.edges = calls.in_order = None
        if torch.is_grad_enabled():
            unit.computed_in = fmt
            call = self._new_call(fmt)
            inputs, produced = with_producers(inputs)
            calls.edges = CallEdges(call, produced, recomputed=self._pass.in_backward)
            if not produced:
                call.ends_with_gradients = not any(t.requires_grad for t in with_inner(iter_tensors(inputs)))
            for tensor in produced:
                self._pass.follow(tensor)
        else:
            self._pass.begin_without_graph()
        return inputs

    def _new_call(self, fmt: GatherFormat) -> Call:
        """Return a call that begins, in `order` if all ranks make the call and gather for it.

        In a block of `zero.gathered`, one rank may make it alone. In a backward, calls are made again.
        """
        unit = self.unit
        call = Call(unit.name, unit.index, fmt, unit.changes, next_number())
        if not (unit.resident or unit.held_exact or torch._C._current_graph_task_id() >= 0):
            self._calls.in_order = call
            self._pass.order.enter(call)
        return call

    def _acquire(self, fmt: GatherFormat) -> None:
        """Gather the unit.

        A unit that is recomputed during its backward is gathered already, and this use is not part of the
        order that `schedule` learns: ranks that have used nothing of the unit do not recompute it.
        """
        used = self.unit.calls_in_backward or self.unit.kept - FOR_PARTS
        again = used and self.unit.state(fmt) is State.GATHERED
        self.unit.gather(fmt)
        if not again:
            self._pass.schedule.follow(self.unit, fmt)

    def _end_call(self, output: Any) -> Any:
        """Release the unit, if possible; return the output of its forward."""
        calls, unit = self._calls, self.unit
        if calls.depth == 0:
            return output  # an exception further out has reset it
        calls.depth -= 1
        unit.forwards -= 1
        if calls.depth:
            return output
        edges, calls.edges = calls.edges, None
        with apart():
            self._pass.mark(unit)
            unit.end_compute()
        in_order = calls.in_order is not None
        output, tensors = self._without_views(output, with_inner(iter_tensors(output)))
        made = [] if edges is None else [tensor for tensor in tensors if edges.has_made(tensor)]
        if edges is not None and edges.inputs and not made:
            output = edges.placed_in_graph(output)
            made = [tensor for tensor in with_inner(iter_tensors(output)) if edges.has_made(tensor)]
        if edges is not None and made:
            self._follow(edges, made)
        self._leave_order()
        recomputed = self._pass.in_backward
        if bool(made) if recomputed else in_order and self._pass.schedule.needed_soon(unit):
            unit.stay_gathered()
        else:
            with apart():
                unit.release()
        return output

    def _without_views(self, output: Any, tensors: list[Tensor]) -> tuple[Any, list[Tensor]]:
        """Copy what is a view of a parameter, so that the unit can go; return the output, and its tensors.

        The ranks could not know of one another which of them still have the unit.
        """
        if self.unit.held_exact or not self.unit.has_views_among(tensors):
            return output, tensors
        output = map_tensors(lambda t: t.clone() if self.unit.has_views_among([t]) else t, output)
        tensors = with_inner(iter_tensors(output))
        if self.unit.has_views_among(tensors):  # in what cannot be mapped
            self.unit.kept.add(Keep.VIEWED)
        return output, tensors

    def _follow(self, edges: CallEdges, made: Sequence[Tensor]) -> None:
        """Have the call's backward begin with a gradient of an output.

        A view that is changed in place gets another producer, made from its base's.
        """
        bases = [t._base for t in made if t._base is not None and edges.has_made(t._base)]
        for tensor in (*made, *bases):
            self._pass.follow(tensor, edges)
        edges.keep_receivers(self._calls.parameters)
        self._calls.in_graphs.add(edges)
        self._calls.open_ended |= edges.call.newest_input < 0 and self._calls.in_order is None
        edges.outputs = [weakref.ref(tensor) for tensor in made]

    def _leave_order(self) -> None:
        if self._calls.in_order is not None:
            self._pass.order.leave(self._calls.in_order)
            self._calls.in_order = None

    def gather_for_part(self) -> bool:
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
            self.unit.gather_to_keep(Keep.PART_CALLED if torch.is_grad_enabled() else Keep.PART_READ)
        if torch.is_grad_enabled():
            self._calls.open_ended = True
            self.unit.computed_in = self.unit.format_for(None)
            self._new_call(self.unit.computed_in)
            self._leave_order()
        self._pass.mark(self.unit)
        return True

    def _part_being_called(self) -> nn.Module | None:
        """Return the outermost module inside the unit that is called past it, and has no hooks yet."""
        if self.unit.resident or self._pass.in_graph:  # resident: it is away
            return None
        inside = {module for hooked in self.unit.hooked_modules for module in hooked.modules()}
        part = next((module for module in modules_called() if module in inside), None)
        return None if part in self._hooked else part


@cache
def _untraced() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """What gathers before and releases after a forward, for dynamo to leave alone.

    Not as decorators: dynamo takes seconds to import, and only engines need it.
    """
    return torch.compiler.disable(UnitHooks._begin_call), torch.compiler.disable(UnitHooks._end_call)


@cache
def _report_parametrizations() -> None:
    """Tell units of parametrizations that a forward registers and takes away again, as PEFT does for adapters
    on parameters, from now on, in the whole process."""
    register_module_module_registration_hook(_registered)


def _registered(parent: nn.Module, name: str, module: nn.Module | None) -> None:
    """`torch.nn.utils.parametrize` sets the parameter to itself, which torch counts as a write in place."""
    if isinstance(module, ParametrizationList):
        original = getattr(module, "original", None)  # several, if a parametrization divides it
        known: UncopiedRef[UnitHooks] | None = getattr(original, "__dict__", {}).get(UNIT_ATTRIBUTE)
        hooks = None if known is None else known()
        if hooks is not None and original is not None:
            hooks.unit.guard.set_to_itself(original)
