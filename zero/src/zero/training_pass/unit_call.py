"""One forward call of a unit, as autograd's graph knows it: what it was given and what it has made.

See `progress` for the terms.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from accelz import HOST
from zero.sharding.tensors import iter_tensors, map_tensors, with_inner
from zero.tiers.apart import apart
from zero.training_pass.progress import number_of
from zero.training_pass.turn import Turn


class Call:
    """What autograd's graph holds of one forward of a unit.

    The graph holds it through its outputs, where Python's garbage collector does not see it, and a model may
    keep one of its own outputs. So neither call nor turn holds the unit: a cycle would never be freed.

    turn: in backwards. inputs: producers of its inputs, until its backward is over. outputs: the tensors it
    has made, while they exist. produced: its inputs that have producers. recomputed: it runs in a backward,
    whose thread counts nodes for itself.
    """

    def __init__(self, turn: Turn, produced: Sequence[Tensor], recomputed: bool) -> None:
        self.turn = turn
        self.inputs = [tensor.grad_fn for tensor in produced if tensor.grad_fn is not None]
        self.outputs: list[weakref.ref[Tensor]] = []
        turn.newest_input = max(map(number_of, produced), default=-1)
        turn.call = weakref.ref(self)
        self._recomputed = recomputed
        self._passes_on = False  # it returns its newest input and nothing else

    @property
    def begins_at(self) -> int:
        """The number that autograd has come to when this call's backward begins.

        It is the call's start, if the call only passes its input on and has no node of its own; else -1, for
        the numbers of its outputs.
        """
        return self.turn.start if self._passes_on and not self._recomputed else -1

    def is_in_graph(self) -> bool:
        """Return whether the running task goes through this call, from its outputs to its inputs."""
        known, all_known = self._known_outputs()
        if all_known and not _any_runs(known):
            return False
        return _any_runs(self.inputs)

    def may_begin(self, root: Any) -> bool:
        """Return whether the running task comes to an output of this call; True where nothing tells.

        root: the first node of the task, which it has not on record.
        """
        known, all_known = self._known_outputs()
        if any(node is root for node in known) or _any_runs(known):
            return True
        return not all_known and (not self.inputs or _any_runs(self.inputs))

    def _known_outputs(self) -> tuple[list[Any], bool]:
        """Return the producers of outputs that still exist, and whether all do."""
        outputs = [output() for output in self.outputs]
        known = [tensor.grad_fn for tensor in outputs if tensor is not None and tensor.grad_fn is not None]
        return known, len(known) == len(outputs)

    def has_made(self, tensor: Tensor) -> bool:
        """Return whether the call made a tensor, rather than only passing it on."""
        if tensor.grad_fn is None:
            return False
        if any(tensor.grad_fn is producer for producer in self.inputs):
            return self._passes_on and number_of(tensor) == self.turn.newest_input
        return self._recomputed or number_of(tensor) >= self.turn.start

    def placed_in_graph(self, output: Any) -> Any:
        """Return views of the output of a call that has made nothing itself.

        That gives the call a place in the graph, as on ranks that have used the unit.
        """
        output = map_tensors(lambda t: t.view_as(t) if t.grad_fn is not None and _is_plain(t) else t, output)
        self._passes_on = not any(
            map(self.has_made, with_inner(iter_tensors(output)))
        )  # in what cannot be mapped
        if self._passes_on:  # uses up a number, so that what follows is newer
            with apart():
                torch.ones((), device=HOST, requires_grad=True).neg()
        return output

    def begin(self) -> None:
        self.turn.begin()


def _any_runs(nodes: Iterable[Any]) -> bool:
    return any(map(torch._C._will_engine_execute_node, nodes))


def with_producers(inputs: tuple[Any, Any]) -> tuple[tuple[Any, Any], list[Tensor]]:
    """Return the inputs, and a list of those that have producers.

    If none has one, a view takes the place of the first leaf that gradients go to. Parameters and the
    caller's containers are left as they are.
    """
    produced = [tensor for tensor in with_inner(iter_tensors(inputs)) if tensor.grad_fn is not None]
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
