"""Keeps what a forward uses last and its backward uses first gathered in between.

Only where this does not raise the peak: no other unit is gathered after the unit's release in the forward,
and none before its gather in the backward. If the backward never comes, the next forward drops the bytes.

Needs: a forward and its backward with gathers in their final dtypes (`fuse_casts`).
"""

from __future__ import annotations

from zero.compiled.graphs import ShardedGraph, travels_in


def retain(forward: ShardedGraph, backward: ShardedGraph) -> int:
    """Returns how many units stay gathered: one or none."""
    for first in backward.waits()[:1]:
        unit, waits = backward.unit_of(first), forward.waits()
        same = [w for w in waits if forward.unit_of(w) == unit and travels_in(w) is travels_in(first)]
        release, order = forward.releases().get(unit), forward.positions()
        if same and release is not None and order[release] > max(order[w] for w in waits):
            release.args = (*release.args[:3], True)
            return 1
    return 0
