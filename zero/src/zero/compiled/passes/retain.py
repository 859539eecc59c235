"""What a forward uses last and its backward first stays gathered in between.

Only where it costs no peak: after the unit's release no other unit is gathered in the forward, and before its
gather none in the backward. If the backward never comes, the next forward drops the bytes.

Needs: a forward and its backward with gathers in the dtypes they will have (`fuse_casts`).
"""

from __future__ import annotations

from zero.compiled.graphs import ShardedGraph, cast_to
from zero.compiled.ops import ALLGATHER, RELEASE


def retain(forward: ShardedGraph, backward: ShardedGraph) -> int:
    """Returns how many units stay gathered: one or none."""
    for first in backward.graph.find_nodes(op="call_function", target=ALLGATHER)[:1]:
        unit = backward.unit_of(first)
        gathers = forward.graph.find_nodes(op="call_function", target=ALLGATHER)
        same = [g for g in gathers if forward.unit_of(g) == unit and cast_to(g) is cast_to(first)]
        releases = forward.graph.find_nodes(op="call_function", target=RELEASE)
        order = forward.positions()
        for release in releases if same else []:
            if release.args[2] == unit and order[release] > max(order[g] for g in gathers):
                release.args = (*release.args[:3], True)
                return 1
    return 0
