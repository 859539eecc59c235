"""Hands each parameter's gradient to the engine as soon as it exists, not as an output of the backward.

Its buffer is reduced while the backward goes on, and no more than a few units' gradients are ever whole. In
units that are gathered, a gradient that the graph only casts to fp32 at the end travels as it was computed,
as in the eager engine under autocast; this holds for all gradients of a unit in this graph, or for none.

Needs: a backward whose outputs are the gradients of the forward's inputs, in their order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from zero.compiled.facts import ParameterFacts
from zero.compiled.graphs import ShardedGraph, cast_of, dtype_of, outputs
from zero.compiled.ops import REDUCE


def reduce_gradients(graph: ShardedGraph, inputs: Sequence[ParameterFacts | None]) -> int:
    """inputs: of the forward, by place; None for those that are not parameters. Returns how many gradients
    go."""
    result = list(outputs(graph.graph).args[0])  # type: ignore[arg-type]
    if len(result) != len(inputs):
        raise RuntimeError(f"a backward with {len(result)} outputs for {len(inputs)} inputs")
    taken = {
        place: parameter
        for place, parameter in enumerate(inputs)
        if parameter is not None and parameter.trainable and result[place] is not None
    }
    resident = {number for number, unit in enumerate(graph.facts.units) if unit.resident}
    gradients = _as_computed(result, taken, wide=resident)
    order = graph.positions()
    last = {taken[p].unit: p for p in sorted(taken, key=lambda p: order[gradients[p]])}
    ends = {node: node for node in gradients.values()}  # if one is of several parameters: after what is there
    for place, parameter in taken.items():
        gradient = gradients[place]
        with graph.graph.inserting_after(ends[gradient]):
            arguments = (gradient, graph.facts.handle, parameter.number)
            ends[gradient] = graph.call(REDUCE, *arguments, last[parameter.unit] == place)
        result[place] = None
    outputs(graph.graph).args = (tuple(result),)
    graph.graph.eliminate_dead_code()
    return len(taken)


def _as_computed(
    result: Sequence[fx.Node], taken: dict[int, ParameterFacts], wide: set[int]
) -> dict[int, fx.Node]:
    """The gradients by place; as they were before being widened, if all of the unit's gradients are only
    widened. wide: units whose gradients stay as they are, too."""
    narrow = {place: _before_widening(result[place]) for place in taken}
    wide = wide | {taken[place].unit for place, node in narrow.items() if node is None}
    return {
        place: result[place] if node is None or taken[place].unit in wide else node
        for place, node in narrow.items()
    }


def _before_widening(gradient: fx.Node) -> fx.Node | None:
    """What a cast to fp32 at the very end is made from; None if there is no such cast."""
    if cast_of(gradient) is not torch.float32 or len(gradient.users) > 1:
        return None
    source = gradient.all_input_nodes[0]
    dtype = dtype_of(source)
    return source if dtype is not None and dtype.is_floating_point and dtype.itemsize < 4 else None
