"""Gathers begin before the unit in front of them is used, as far ahead as a byte budget allows.

The budget bounds what is under way or waiting ahead of its first use. It is the same number on every rank
and so is the graph: all ranks issue the same gathers in the same order. A prefetch carries the dtype of its
gather.

Needs: gathers in the dtypes they will have (`fuse_casts`).
"""

from __future__ import annotations

from torch import fx

from zero.compiled.graphs import ShardedGraph, cast_to
from zero.compiled.ops import ALLGATHER, PREFETCH


def prefetch(graph: ShardedGraph, budget: int) -> int:
    """budget in bytes. Returns how many gathers begin ahead."""
    gathers = list(graph.graph.find_nodes(op="call_function", target=ALLGATHER))
    begun, ahead = 1, 0  # gathers begun before the current one is waited for, and their bytes
    for place, current in enumerate(gathers):
        if place and begun > place:
            ahead -= graph.nbytes(current)
        begun = max(begun, place + 1)
        behind = list(current.users)[len(current.args[0]) - 1]
        while begun < len(gathers) and ahead + graph.nbytes(gathers[begun]) <= budget:
            behind = _begin(graph, gathers[begun], behind)
            ahead += graph.nbytes(gathers[begun])
            begun += 1
    return len(graph.graph.find_nodes(op="call_function", target=PREFETCH))


def _begin(graph: ShardedGraph, gather: fx.Node, behind: fx.Node) -> fx.Node:
    """Right behind the node `behind`: the last value of a gather, or another prefetch."""
    with graph.graph.inserting_after(behind):
        arguments = (gather.args[0], graph.facts.handle, graph.unit_of(gather))
        return graph.call(PREFETCH, *arguments, cast_to(gather))
