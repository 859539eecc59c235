"""Puts the nodes of a graph into an order that takes less memory.

List scheduling: of the nodes whose inputs are there, the one that raises the peak least runs next; among
equals the one that leaves least behind, then the one that is wanted first. A gather takes memory and gives
nothing back, so it waits until nothing else can run; what drops a unit or an activation runs at once. The new
order is taken only if its predicted peak is lower.

Collectives keep their order, gathers and gradients alike: sizes of activations may differ between ranks, but
what ranks do together may not. Operations with effects and random ones keep theirs too; and whatever writes
to a value stays between those that read it before and after.

Needs: gathers and releases in their final dtypes (`fuse_casts`), gradients on their way (`reduce_gradients`),
and no gather that begins ahead.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import fx

from zero.compiled.graphs import ShardedGraph, outputs, writes
from zero.compiled.liveness import Liveness
from zero.compiled.ops import ALLGATHER, NAMESPACE, REDUCE

COLLECTIVES = (ALLGATHER, REDUCE)
WINDOW = 64  # ready nodes looked at, those wanted first

Before = dict[fx.Node, set[fx.Node]]


def list_schedule(graph: ShardedGraph, inputs_go: bool) -> int:
    """inputs_go: as in `Liveness`. Returns by how many bytes the predicted peak falls."""
    liveness = Liveness(graph, inputs_go)
    written = list(graph.graph.nodes)
    order = _greedy(graph, liveness)
    gain = liveness.peak_of(written) - liveness.peak_of(order)
    if gain > 0:
        for node in order[len(graph.graph.find_nodes(op="placeholder")) : -1]:
            order[-1].prepend(node)
    return max(gain, 0)


def _greedy(graph: ShardedGraph, liveness: Liveness) -> list[fx.Node]:
    before, live = _before(graph, liveness), liveness.start()
    wanted = _as_wanted(before, graph.positions())
    order = graph.graph.find_nodes(op="placeholder")
    for node in order:
        live.run(node)
    waiting = {node: len(earlier) for node, earlier in before.items()}
    behind: dict[fx.Node, list[fx.Node]] = {}
    for node, earlier in before.items():
        for one in earlier:
            behind.setdefault(one, []).append(node)
    ready = sorted((node for node, count in waiting.items() if not count), key=wanted.__getitem__)
    while ready:
        node = min(ready[:WINDOW], key=lambda n: (*live.would(n), wanted[n]))
        ready.remove(node)
        live.run(node)
        order.append(node)
        for later in behind.get(node, ()):
            waiting[later] -= 1
            if not waiting[later]:
                insort(ready, later, key=wanted.__getitem__)
    return [*order, outputs(graph.graph)]


def _as_wanted(before: Before, written: dict[fx.Node, int]) -> dict[fx.Node, int]:
    """Each node's place if nothing ran before something wants it."""
    places: dict[fx.Node, int] = {}
    needed = set().union(*before.values())
    for last in (node for node in before if node not in needed):
        stack = [last]
        while stack:
            missing = [n for n in before[stack[-1]] if n not in places]
            if missing:
                stack.append(min(missing, key=written.__getitem__))
            else:
                places.setdefault(stack.pop(), len(places))
    return places


def _before(graph: ShardedGraph, liveness: Liveness) -> Before:
    """For each node, in the order as written, what has to run before it; without inputs and the output."""
    nodes = [n for n in graph.graph.nodes if n.op not in ("placeholder", "output")]
    found: Before = {node: {i for i in node.all_input_nodes if i.op != "placeholder"} for node in nodes}
    for chain in ([n for n in nodes if n.target in COLLECTIVES], [n for n in nodes if _has_effect(n)]):
        for earlier, later in pairwise(chain):
            found[later].add(earlier)
    _keep_writes(nodes, liveness, found)
    return found


def _keep_writes(nodes: Sequence[fx.Node], liveness: Liveness, found: Before) -> None:
    """Whatever touches a value that is written to stays on its side of the write."""
    touching: dict[fx.Node, list[fx.Node]] = {}
    writing: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        written = {s for i in node.all_input_nodes if writes(node, i) for s in liveness.storages[i]}
        for storage in liveness.touched[node]:
            found[node].update(writing.get(storage, [])[-1:])
            touching.setdefault(storage, []).append(node)
        for storage in written:
            found[node].update(n for n in touching[storage] if n is not node)
            writing.setdefault(storage, []).append(node)
            touching[storage] = [node]


def _has_effect(node: fx.Node) -> bool:
    """Whether its order among others of its kind matters, beyond what is written to its inputs."""
    if isinstance(node.target, torch._ops.OpOverload):
        return torch.Tag.nondeterministic_seeded in node.target.tags or (
            node.is_impure() and node.target.namespace != NAMESPACE
        )
    return isinstance(node.target, torch._ops.HigherOrderOperator)
