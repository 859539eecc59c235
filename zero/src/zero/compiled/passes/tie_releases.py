"""Gives a release, as arguments, the results that were computed from the values and are still needed.

A compiler that fuses operations computes a result where it is used. That may be after a release, which is
only declared to write to the values; the released values would then be read once more. Results that are
arguments have to be there first: those in front of the release that descend from the values and are used
after it.

Needs: releases in their final places. Only for compilers that fuse; elsewhere the order of the graph holds.
"""

from __future__ import annotations

from torch import fx

from zero.compiled.graphs import ShardedGraph, dtype_of, is_alias, is_generator_state
from zero.compiled.ops import RELEASE


def tie_releases(graph: ShardedGraph) -> int:
    """Returns how many results are tied to a release."""
    order = graph.positions()
    return sum(_tie(wait, order) for wait in graph.waits())


def _tie(wait: fx.Node, order: dict[fx.Node, int]) -> int:
    aliases: set[fx.Node] = set(wait.users)
    results: set[fx.Node] = set()
    node = wait.next
    while node.target is not RELEASE or not aliases.intersection(node.all_input_nodes):
        if any(is_alias(node, source) for source in aliases.intersection(node.all_input_nodes)):
            aliases.add(node)
        elif not (aliases | results).isdisjoint(node.all_input_nodes):
            results.add(node)
        node = node.next
    needed = [r for r in results if any(order[user] > order[node] for user in r.users)]
    # What the compiler computes here, it may compute later.
    computed = [r for r in needed if dtype_of(r) is not None and not is_generator_state(r)]
    tied = sorted(computed, key=order.__getitem__)
    keep = node.args[3] if len(node.args) > 3 else False
    node.args = (*node.args[:3], keep, tied)
    return len(tied)
