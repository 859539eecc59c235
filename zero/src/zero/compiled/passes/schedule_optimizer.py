"""Brings optimizer state to the device while the backward runs, and back to the host while the forward does.

A backward gives memory back as it goes. A unit's state comes as soon as it fits under the peak that the two
graphs have anyway, from there to the end, so that the step finds it there. After its step it stays, and the
next forward sends it back: all at the top, and each has gone before its memory is needed. What does not fit
comes on its turn in the step, which needs room for the records that pass through.

Which state is there is known only when a graph runs: a backward that no step follows brings nothing, and what
was brought for a forward with other shapes goes first.

Needs: a forward and a backward in which everything else has its place (`prefetch`, `reload_parameters`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, groupby

import torch
from torch import fx

from zero.compiled.graphs import ShardedGraph, outputs
from zero.compiled.liveness import Liveness, streamed_bytes
from zero.compiled.ops import OFFLOAD_OPTIMIZER, RELOAD_OPTIMIZER, WAIT_OFFLOAD_OPTIMIZER


def schedule_optimizer(forward: ShardedGraph, backward: ShardedGraph) -> int:
    """Returns how many units' state comes in the backward."""
    before = Liveness(forward, inputs_go=False).during(forward.graph.nodes)
    after = Liveness(backward, inputs_go=True).during(backward.graph.nodes)
    peak = max(*before.values(), *after.values())
    places = _room_from(backward, after, peak)
    coming = _chosen(backward, places[-1][1]) if places else []  # a backward may have nothing to do
    _bring(backward, coming, places)
    _send(forward, coming, before, peak)
    return len(coming)


def send_optimizer(graph: ShardedGraph) -> None:
    """For a forward that no backward follows: send back, at the top, the optimizer state that has stayed on
    the device."""
    _send(graph, [], {}, 0)


def _away(graph: ShardedGraph) -> list[int]:
    return [index for index, unit in enumerate(graph.facts.units) if unit.streamed]


def _chosen(backward: ShardedGraph, room: int) -> list[int]:
    """The units that come, in the order of their steps. room: bytes at the end of the backward."""
    units, room = _away(backward), room - backward.facts.scratch
    if not backward.parameters or streamed_bytes(backward, units) <= room:
        return units if backward.parameters else []
    room -= backward.facts.passing
    coming = []
    for unit in units:
        if backward.facts.units[unit].streamed <= room:
            room -= backward.facts.units[unit].streamed
            coming.append(unit)
    return coming


def _bring(backward: ShardedGraph, coming: Sequence[int], places: Sequence[tuple[fx.Node, int]]) -> None:
    """Begin to bring each at the first place where it fits together with those before it."""
    wanted = accumulate(backward.facts.units[unit].streamed for unit in coming)
    firsts = [next(node for node, room in places if room >= nbytes) for nbytes in wanted]
    for node, group in groupby(zip(firsts, coming, strict=True), key=lambda pair: pair[0]):
        _insert(backward, RELOAD_OPTIMIZER, node, [unit for _, unit in group])


def _room_from(graph: ShardedGraph, during: dict[fx.Node, int], peak: int) -> list[tuple[fx.Node, int]]:
    """For each node, in order, the bytes below the peak that stay free from there to the end."""
    nodes = [n for n in graph.graph.nodes if n.op == "call_function"]
    highest = list(accumulate((during[n] for n in [outputs(graph.graph), *reversed(nodes)]), max))[:0:-1]
    return [(node, peak - most) for node, most in zip(nodes, highest, strict=True)]


def _send(forward: ShardedGraph, staying: Sequence[int], during: dict[fx.Node, int], peak: int) -> None:
    """Begin to send all of `staying` at the top; wait for each where its memory is needed, or at the end."""
    nodes = [n for n in forward.graph.nodes if n.op == "call_function"]
    others = [unit for unit in _away(forward) if unit not in staying]
    top = [*nodes, outputs(forward.graph)][0]
    _insert(forward, WAIT_OFFLOAD_OPTIMIZER, top, others)
    _insert(forward, OFFLOAD_OPTIMIZER, top, staying)
    waiting = list(staying)
    for node in nodes:
        going = []
        while waiting and during[node] + streamed_bytes(forward, waiting) > peak:
            going.append(waiting.pop(0))
        _insert(forward, WAIT_OFFLOAD_OPTIMIZER, node, going)
    _insert(forward, WAIT_OFFLOAD_OPTIMIZER, outputs(forward.graph), waiting)


def _insert(
    graph: ShardedGraph, operation: torch._ops.OpOverload, before: fx.Node, units: Iterable[int]
) -> None:
    parameters, numbers = list(graph.parameters), list(units)
    if parameters and numbers:
        with graph.graph.inserting_before(before):
            graph.call(operation, parameters, graph.facts.handle, numbers)
