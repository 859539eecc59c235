"""Keeps nothing from forward to backward that is derived from a sharded parameter alone.

A partitioner would save a weight's 16-bit copy or its transpose, and so keep a whole copy of the model alive.
The backward gets the parameter itself instead, which costs nothing while it is sharded, and derives the rest
again.

Needs: a forward and a backward as AOTAutograd partitioned them, before any other pass.
"""

from __future__ import annotations

from torch import fx

from zero.compiled.graphs import ShardedGraph, outputs


def save_sharded(forward: ShardedGraph, backward: ShardedGraph, kept: int) -> int:
    """Change what crosses from `forward` to `backward`; returns how many values no longer do.

    kept: how many outputs of the forward are the model's own, in front of those saved for backward.
    """
    derived = forward.derived()
    result = list(outputs(forward.graph).args[0])  # type: ignore[arg-type]
    received = {n.name: n for n in backward.graph.find_nodes(op="placeholder")}
    moved = [n for n in result[kept:] if n in derived and n.name in received]
    for node in moved:
        root = derived[node]
        if root not in result[kept:]:
            result.insert(result.index(node), root)
            received[root.name] = _receive(backward, received[node.name], root)
        result.pop(result.index(node, kept))
    for node in moved:
        _derive_again(backward, node, derived[node], received)
    outputs(forward.graph).args = (tuple(result),)
    for sharded in (forward, backward):
        sharded.graph.eliminate_dead_code()
    return len(moved)


def _receive(backward: ShardedGraph, before: fx.Node, root: fx.Node) -> fx.Node:
    with backward.graph.inserting_before(before):
        placeholder = backward.graph.placeholder(root.name)
    placeholder.meta = dict(root.meta)
    return placeholder


def _derive_again(backward: ShardedGraph, node: fx.Node, root: fx.Node, received: dict[str, fx.Node]) -> None:
    """Replace what the backward received as `node` by its derivation from `root`, at its first use."""
    old = received[node.name]
    order = backward.positions()
    used = [user for user in old.users if user.op != "output"]
    first = min(used, key=order.__getitem__) if used else outputs(backward.graph)
    copies = {root: received[root.name]}
    with backward.graph.inserting_before(first):
        for step in _chain(node, root):
            copies[step] = backward.graph.node_copy(step, copies.__getitem__)
    old.replace_all_uses_with(copies[node])
    backward.graph.erase_node(old)


def _chain(node: fx.Node, root: fx.Node) -> list[fx.Node]:
    """The nodes that compute `node` from `root`, in order."""
    found: dict[fx.Node, None] = {}

    def visit(step: fx.Node) -> None:
        if step is not root and step not in found:
            for source in step.all_input_nodes:
                visit(source)
            found[step] = None

    visit(node)
    return list(found)
