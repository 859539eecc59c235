"""One forward call of a unit, as its backward will see it: what it was given, what it has made, in autograd's
terms (`progress`)."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from accelz.flat_buffer import HOST
from zero.errors import UsageError
from zero.hooks.progress import next_number, number_of
from zero.sharding.cast import Cast
from zero.sharding.sharded_unit import ShardedUnit
from zero.sharding.tensors import iter_tensors, map_tensors


class CallUser(Protocol):
    """What is told when a call's backward begins and ends."""

    def begin_backward(self, call: Call) -> None: ...

    def end_backward(self, call: Call) -> None: ...


class Call:
    """One forward call of a unit, as its backward will see it.

    Autograd's graph holds it through its outputs, where Python's garbage collector does not see it, and a
    model may keep one of its own outputs. So the call does not hold the unit: a cycle would never be freed.

    inputs: producers of its inputs, until its backward is over. outputs: the tensors it has made, while they
    exist. produced: its inputs that have producers. recomputed: it runs in a backward, whose thread counts
    nodes for itself. See `progress` for the terms and for the other attributes.
    """

    def __init__(
        self, hooks: CallUser, unit: ShardedUnit, cast: Cast, produced: Sequence[Tensor], recomputed: bool
    ) -> None:
        self.cast = cast
        self.inputs = [tensor.grad_fn for tensor in produced if tensor.grad_fn is not None]
        self.outputs: list[weakref.ref[Tensor]] = []
        self.task = -1
        self.start = next_number()
        self.newest_input = max(map(number_of, produced), default=-1)
        self.index = unit.index
        self.changes = unit.changes
        self.ends_with_gradients = True  # of the unit's parameters, if no input has a producer
        self._recomputed = recomputed
        self._passes_on = False  # it returns its newest input and nothing else
        self._hooks = weakref.ref(hooks)

    @property
    def begins_at(self) -> int:
        """The number that autograd has come to when this call's backward begins.

        It is the call's start, if the call only passes its input on and has no node of its own; else -1, for
        the numbers of its outputs.
        """
        return self.start if self._passes_on and not self._recomputed else -1

    def is_in_graph(self) -> bool:
        """Return whether the running task goes through this call, from its outputs to its inputs."""
        outputs = [output() for output in self.outputs]
        known = [tensor.grad_fn for tensor in outputs if tensor is not None and tensor.grad_fn is not None]
        if len(known) == len(outputs) and not any(map(torch._C._will_engine_execute_node, known)):
            return False
        return any(map(torch._C._will_engine_execute_node, self.inputs))

    def has_made(self, tensor: Tensor) -> bool:
        """Return whether the call made a tensor, rather than only passing it on."""
        if tensor.grad_fn is None:
            return False
        if any(tensor.grad_fn is producer for producer in self.inputs):
            return self._passes_on and number_of(tensor) == self.newest_input
        return self._recomputed or number_of(tensor) >= self.start

    def placed_in_graph(self, output: Any) -> Any:
        """Return views of the output of a call that has made nothing itself.

        That gives the call a place in the graph, as on ranks that have used the unit.
        """
        output = map_tensors(lambda t: t.view_as(t) if t.grad_fn is not None and _is_plain(t) else t, output)
        self._passes_on = not any(map(self.has_made, iter_tensors(output)))  # in what cannot be mapped
        if self._passes_on:  # uses up a number, so that what follows is newer
            torch.ones((), device=HOST, requires_grad=True).neg()
        return output

    def begin(self) -> None:
        hooks = self._hooks()
        if hooks is None:
            raise UsageError(
                "the model and its engine no longer exist: keep them until engine.backward(loss)"
            )
        hooks.begin_backward(self)

    def end(self) -> None:
        hooks = self._hooks()
        if hooks is not None:
            hooks.end_backward(self)


def with_producers(inputs: tuple[Any, Any]) -> tuple[tuple[Any, Any], list[Tensor]]:
    """Return the inputs, and a list of those that have producers.

    If none has one, a view takes the place of the first leaf that gradients go to. Parameters and the
    caller's containers are left as they are.
    """
    produced = [tensor for tensor in iter_tensors(inputs) if tensor.grad_fn is not None]
    args, kwargs = inputs
    leaf = next(filter(_is_plain_leaf, (*args, *kwargs.values())), None)
    if produced or leaf is None:
        return inputs, produced
    view = leaf.view_as(leaf)
    viewed = tuple(view if value is leaf else value for value in args)
    return (viewed, {name: view if value is leaf else value for name, value in kwargs.items()}), [view]


def _is_plain_leaf(value: Any) -> bool:
    if not isinstance(value, Tensor) or isinstance(value, nn.Parameter):
        return False
    return value.is_leaf and value.requires_grad and _is_plain(value)


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested
