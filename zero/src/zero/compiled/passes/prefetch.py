"""Begins gathers before the unit in front of them is used, as far ahead as a byte budget allows.

The budget bounds what is under way or waiting ahead of its first use. It is the same number on every rank,
and so is the graph: all ranks issue the same gathers in the same order. Gathers that begin at one place are
one operation, which carries their dtypes.

Needs: gathers in their final dtypes (`fuse_casts`), each begun where it is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from zero.compiled.graphs import ShardedGraph, last_value, travels_in
from zero.compiled.ops import PREFETCH


def prefetch(graph: ShardedGraph, budget: int | None) -> int:
    """budget in bytes; None: the graph's largest gather. Returns how many gathers begin ahead."""
    waits = graph.waits()
    if budget is None:
        budget = max(map(graph.nbytes_ahead, waits), default=0)
    begun, ahead = 1, 0  # gathers begun before the current one is waited for, and their bytes
    count = 0
    for place, current in enumerate(waits):
        if place and begun > place:
            ahead -= graph.nbytes_ahead(current)
        begun = first = max(begun, place + 1)
        while begun < len(waits) and ahead + graph.nbytes_ahead(waits[begun]) <= budget:
            ahead += graph.nbytes_ahead(waits[begun])
            begun += 1
        if begun > first:
            _begin(graph, waits[first:begun], current)
            count += begun - first
    return count


def _begin(graph: ShardedGraph, later: Sequence[fx.Node], current: fx.Node) -> None:
    """Begin the gathers of `later` after the last value of `current`."""
    begins, units = graph.begins(), [graph.unit_of(wait) for wait in later]
    for unit in units:
        graph.graph.erase_node(begins[unit])
    parameters = [parameter for wait in later for parameter in wait.all_input_nodes]
    with graph.graph.inserting_after(last_value(current)):
        graph.call(PREFETCH, parameters, graph.facts.handle, units, [travels_in(w) for w in later])
