"""Makes the end of a backward an operation of its own, after everything else.

Needs: a backward in which everything else has its place.
"""

from __future__ import annotations

from zero.compiled.graphs import ShardedGraph, outputs
from zero.compiled.ops import END_BACKWARD


def end_backward(graph: ShardedGraph) -> int:
    """Returns 1, or 0 if the graph has no parameters."""
    parameters = list(graph.parameters)
    if parameters:
        with graph.graph.inserting_before(outputs(graph.graph)):
            graph.call(END_BACKWARD, parameters, graph.facts.handle)
    return int(bool(parameters))
