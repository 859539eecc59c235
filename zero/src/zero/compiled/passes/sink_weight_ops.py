"""Computes what is derived from a sharded parameter alone (a cast, a transpose) right before its use.

If a model casts its weights up front, or a partitioner puts such nodes first, every unit would otherwise be
gathered at the top of the graph and kept until its use.

Needs: a graph without gathers.
"""

from __future__ import annotations

import math

from torch import fx

from zero.compiled.graphs import ShardedGraph


def sink_weight_ops(graph: ShardedGraph) -> int:
    """Returns how many nodes were moved."""
    order: dict[fx.Node, float] = dict(graph.positions().items())
    moved = 0
    for node in reversed(graph.derived()):
        first = min((user for user in node.users if user.op != "output"), key=order.__getitem__, default=None)
        if first is not None and node.next is not first:
            first.prepend(node)
            order[node] = math.nextafter(order[first], -math.inf)
            moved += 1
    return moved
