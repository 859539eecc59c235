"""Keeps what the forward saves for the backward on the host in between.

A value begins to leave after its last use in the forward, one value after another: where the next copy
begins, the device's work waits for the one before it, and has that value's memory from then on. In the
backward, values come back in the order of their first uses, two of them ahead. Those saved first leave first:
they are needed last, and wait longest.

Only dense floating-point values of some size are taken, and only if nothing else that the forward returns is
in the same memory, which would then not become free.

Needs: a forward and a backward whose nodes have their order (`list_schedule`), crossing as AOTAutograd
partitioned them; on a device with memory of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from itertools import accumulate

import torch
from torch import fx

from accelz import HOST
from zero.compiled.graphs import ShardedGraph, outputs, readers
from zero.compiled.liveness import Liveness, bytes_of, hint
from zero.compiled.ops import OFFLOAD, RELOAD, WAIT_OFFLOAD, WAIT_RELOAD

LEAST = 1 << 18  # bytes below which a copy costs more than the memory is worth
AHEAD = 2  # values that come back ahead of their use


def offload_activations(
    forward: ShardedGraph, backward: ShardedGraph, kept: int, part: float, least: int = LEAST
) -> int:
    """kept: how many outputs of the forward are the model's own. part: how much of the bytes that may go does
    go, from 0 to 1.

    Returns how many values go.
    """
    placeholders = backward.graph.find_nodes(op="placeholder")
    received = {n.name: n for n in placeholders if any(user.op != "output" for user in n.users)}
    leaving = _chosen(forward, kept, part, least, received)
    devices = [node.meta["val"].device for node in leaving]
    _send(forward, leaving)
    _bring_back(backward, [(received[n.name], d) for n, d in zip(leaving, devices, strict=True)])
    return len(leaving)


def _chosen(
    forward: ShardedGraph, kept: int, part: float, least: int, received: Container[str]
) -> list[fx.Node]:
    """What leaves, in the order in which it is saved."""
    result: Sequence[fx.Node] = outputs(forward.graph).args[0]  # type: ignore[assignment]
    liveness, order = Liveness(forward, inputs_go=False), forward.positions()
    alone = Counter(s for node in result if isinstance(node, fx.Node) for s in liveness.storages[node])
    may_go = [
        node
        for node in result[kept:]
        if isinstance(node, fx.Node) and node.name in received
        if _is_dense_float(node) and bytes_of(node) >= least
        for storage in liveness.storages[node]
        if alone[storage] == 1 and storage.op != "placeholder" and bytes_of(storage) == bytes_of(node)
    ]
    may_go.sort(key=order.__getitem__)
    budget = part * sum(map(bytes_of, may_go))
    return [
        node for node, taken in zip(may_go, accumulate(map(bytes_of, may_go)), strict=True) if taken <= budget
    ]


def _is_dense_float(node: fx.Node) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.device == HOST:
        return False
    expected = 1
    for stride, size in sorted((hint(t), hint(n)) for t, n in zip(value.stride(), value.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _send(forward: ShardedGraph, leaving: Sequence[fx.Node]) -> None:
    handle, order = forward.facts.handle, forward.positions()
    end = outputs(forward.graph)
    last = {n: max((n, *readers(n)), key=order.__getitem__) for n in leaving}
    behind = {n: last[n].next for n in leaving}
    result = list(end.args[0])  # type: ignore[arg-type]
    gone: tuple[fx.Node, fx.Node] | None = None
    for node in sorted(leaving, key=lambda n: order[last[n]]):
        with forward.graph.inserting_before(behind[node]):
            if gone is not None:
                forward.call(WAIT_OFFLOAD, *gone, handle)
            copy = forward.call(OFFLOAD, node, handle)
        copy.meta["val"] = _on(node.meta["val"], HOST)
        result[result.index(node)] = copy
        gone = copy, node
    if gone is not None:
        with forward.graph.inserting_before(end):
            forward.call(WAIT_OFFLOAD, *gone, handle)
    end.args = (tuple(result),)


def _bring_back(backward: ShardedGraph, returning: Sequence[tuple[fx.Node, torch.device]]) -> None:
    handle, order = backward.facts.handle, backward.positions()
    first = {p: min((u for u in p.users if u.op != "output"), key=order.__getitem__) for p, _ in returning}
    by_use = sorted(returning, key=lambda item: order[first[item[0]]])
    waits = [_wait(backward, placeholder, first[placeholder]) for placeholder, _ in by_use]
    top = next(node for node in backward.graph.nodes if node.op != "placeholder")
    for place, (placeholder, device) in enumerate(by_use):
        before = top if place < AHEAD else waits[place - AHEAD].next
        with backward.graph.inserting_before(before):
            value = backward.call(RELOAD, placeholder, handle, device)
        value.meta["val"] = placeholder.meta["val"]
        for user in tuple(placeholder.users):
            if user is not value:
                user.replace_input_with(placeholder, value)
        placeholder.meta["val"] = _on(placeholder.meta["val"], HOST)


def _wait(backward: ShardedGraph, placeholder: fx.Node, first: fx.Node) -> fx.Node:
    with backward.graph.inserting_before(first):
        return backward.call(WAIT_RELOAD, placeholder, backward.facts.handle)


def _on(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    return value.new_empty_strided(value.size(), value.stride(), device=device)
