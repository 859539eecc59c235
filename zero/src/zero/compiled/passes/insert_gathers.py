"""Gathers every sharded unit right before its first use in a graph and releases it right after its last.

Needs: a graph without gathers. Raises ModelError if the graph writes to a sharded parameter, because the
value would be lost with the bytes.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch import fx

from zero.compiled.graphs import ShardedGraph, readers, writes
from zero.compiled.ops import ALLGATHER, RELEASE, WAIT
from zero.sharding.alterations import written


def insert_gathers(graph: ShardedGraph) -> int:
    """Returns how many gathers there are."""
    count = 0
    for unit, placeholders in graph.by_unit().items():
        used = [p for p in placeholders if any(user.op != "output" for user in p.users)]
        if used:
            _gather(graph, unit, used)
            count += 1
    return count


def _gather(graph: ShardedGraph, unit: int, used: list[fx.Node]) -> None:
    order = graph.positions()
    first = min((u for p in used for u in p.users if u.op != "output"), key=order.__getitem__)
    reading = [r for p in used for r in _checked_readers(graph, p)]
    last = max(reading, key=order.__getitem__)
    handle, numbers = graph.facts.handle, [graph.parameters[p].number for p in used]
    with graph.graph.inserting_before(first):
        begun = graph.call(ALLGATHER, used, handle, unit, torch.float32)
        gathered = graph.call(WAIT, used, handle, numbers, torch.float32)
        values = [graph.graph.call_function(operator.getitem, (gathered, i)) for i in range(len(used))]
    gathered.meta["val"] = [p.meta["val"] for p in used]
    for placeholder, value in zip(used, values, strict=True):
        value.meta["val"] = placeholder.meta["val"]
        for user in tuple(placeholder.users):
            if user not in (begun, gathered) and user.op != "output":
                user.replace_input_with(placeholder, value)
    with graph.graph.inserting_after(last):
        graph.call(RELEASE, values, handle, unit)


def _checked_readers(graph: ShardedGraph, placeholder: fx.Node) -> Iterator[fx.Node]:
    aliases = {placeholder}
    for node in readers(placeholder):
        if any(writes(node, source) for source in aliases):
            raise written(graph.parameters[placeholder].name)
        aliases.add(node)
        yield node
