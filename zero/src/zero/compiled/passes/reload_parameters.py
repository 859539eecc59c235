"""Brings shards that are on the host or on disk to the device ahead of their gather.

Each is under way while those in front of it are gathered, and leaves the device when its own gather is done.
Nothing waits for a shard from the host or the disk that could have been asked for earlier.

Needs: gathers that begin at their final places (`prefetch`).
"""

from __future__ import annotations

from zero.compiled.graphs import ShardedGraph, begun_by, last_value
from zero.compiled.ops import OFFLOAD_PARAMETER, RELOAD_PARAMETER

AHEAD = 2  # gathers that begin between


def reload_parameters(graph: ShardedGraph) -> int:
    """Returns how many units are brought."""
    begun = [(unit, node) for node in graph.graph.nodes for unit, _ in begun_by(node)]
    parameters = graph.by_unit()
    waits = {graph.unit_of(wait): wait for wait in graph.waits()}
    away = [place for place, (unit, _) in enumerate(begun) if graph.facts.units[unit].away]
    for place in away:
        unit, _ = begun[place]
        with graph.graph.inserting_before(begun[max(place - AHEAD, 0)][1]):
            graph.call(RELOAD_PARAMETER, parameters[unit], graph.facts.handle, unit)
        with graph.graph.inserting_after(last_value(waits[unit])):
            graph.call(OFFLOAD_PARAMETER, parameters[unit], graph.facts.handle, unit)
    return len(away)
