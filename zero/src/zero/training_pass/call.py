"""One forward of a unit: its place in backwards, and where autograd's graph enters and leaves it.

See `progress` for the terms.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from accelz import HOST
from zero.sharding.gather_format import GatherFormat
from zero.sharding.tensors import iter_tensors, map_tensors, with_inner
from zero.tiers.apart import apart


@dataclass(slots=True, eq=False)
class Call:
    """The place of one forward of a unit in backwards. It outlives what autograd's graph holds of the call.

    unit, index: the unit's name and number. fmt: what the forward computed in. changes: see `ShardedUnit`,
    as of the forward. start: the number of the first node that may be its own. newest_input: the number of
    the newest producer of its inputs; -1 if they have none. task: that of its backward. taken: whether the
    backward under way goes through the call on this rank or, as far as is known, on any.
    ends_with_gradients: of the unit's parameters, if no input has a producer. differentiated: its backward
    was part of a graph.
    """

    unit: str
    index: int
    fmt: GatherFormat
    changes: int
    start: int
    newest_input: int = -1
    task: int = -1
    taken: bool = False
    ends_with_gradients: bool = True
    differentiated: bool = False
    _edges: ref[CallEdges] | None = None

    @property
    def edges(self) -> CallEdges | None:
        """What a graph of this rank has of the call, so that a backward may come to it; None if none has."""
        return None if self._edges is None else self._edges()

    def expect(self, task: int, root: Any) -> None:
        """Autograd has entered a graph that may have the call, in `task`, at node `root`."""
        self.task = task
        edges = self.edges
        self.taken = edges is not None and edges.may_begin(root)

    def forget_graph(self) -> None:
        """Note that the graph is gone: its producers would keep the inputs' graph alive."""
        if (edges := self.edges) is not None:
            edges.inputs.clear()


class CallEdges:
    """What autograd's graph holds of a call: the producers of what it was given, and what it has made.

    The graph holds it through the outputs, where Python's garbage collector does not see it, and a model may
    keep one of its own outputs. So neither this nor the call holds the unit: a cycle would never be freed.

    inputs: producers of its inputs, until its backward is over. outputs: the tensors it has made, while they
    exist. receivers: the nodes in which parameters get gradients of another dtype than they have outside of
    the call; torch forgets them when the parameters have their own dtype back. produced: its inputs that have
    producers. recomputed: it runs in a backward, whose thread counts nodes for itself.
    """

    def __init__(self, call: Call, produced: Sequence[Tensor], recomputed: bool) -> None:
        self.call = call
        self.inputs = [tensor.grad_fn for tensor in produced if tensor.grad_fn is not None]
        self.outputs: list[ref[Tensor]] = []
        self.receivers: list[Any] = []
        call.newest_input = max(map(number_of, produced), default=-1)
        call._edges = ref(self)
        self._recomputed = recomputed
        self._passes_on = False  # it returns its newest input and nothing else

    @property
    def begins_at(self) -> int:
        """The number that autograd has come to when the call's backward begins.

        It is the call's start, if the call only passes its input on and has no node of its own; else -1, for
        the numbers of its outputs.
        """
        return self.call.start if self._passes_on and not self._recomputed else -1

    def keep_receivers(self, parameters: Iterable[nn.Parameter]) -> None:
        """Note the parameters' receivers, while they have the dtype that the call computes in."""
        if self.call.fmt.dtype is not None:
            with apart(), torch._C.DisableTorchFunctionSubclass():
                self.receivers = [get_gradient_edge(p).node for p in parameters if p.requires_grad]

    def gives_gradients(self) -> bool:
        """Return whether the running task comes to a receiver."""
        return _any_runs(self.receivers)

    def is_in_graph(self) -> bool:
        """Return whether the running task goes through the call, from its outputs to its inputs."""
        known, all_known = self._known_outputs()
        if all_known and not _any_runs(known):
            return False
        return _any_runs(self.inputs)

    def may_begin(self, root: Any) -> bool:
        """Return whether the running task comes to an output of the call; True where nothing tells.

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
            return self._passes_on and number_of(tensor) == self.call.newest_input
        return self._recomputed or number_of(tensor) >= self.call.start

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


def _any_runs(nodes: Iterable[Any]) -> bool:
    return any(map(torch._C._will_engine_execute_node, nodes))


def with_producers(inputs: tuple[Any, Any]) -> tuple[tuple[Any, Any], list[Tensor]]:
    """Return the inputs, and a list of those that have producers.

    If none has one, a view takes the place of the first leaf that gradients go to. Parameters and the
    caller's containers are left as they are.
    """
    produced = [tensor for tensor in with_inner(iter_tensors(inputs)) if tensor.grad_fn is not None]
    args, kwargs = inputs
    leaf = None if produced else next(filter(_is_plain_leaf, (*args, *kwargs.values())), None)
    if leaf is None:
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


def number_of(tensor: Tensor) -> int:
    """Return the number of a tensor's producer."""
    assert tensor.grad_fn is not None
    return tensor.grad_fn._sequence_nr()


def next_number() -> int:
    """Return the number of the next node that this thread makes."""
    return torch.autograd._get_sequence_nr()
