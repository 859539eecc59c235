"""Small graphs of three parameters, for passes to change."""

from __future__ import annotations

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from zero.compiled.facts import Facts, ParameterFacts, UnitFacts
from zero.compiled.graphs import ShardedGraph, text

HANDLE = 7
FACTS = Facts(
    HANDLE,
    (
        UnitFacts("a", False, {torch.float32: 16}),
        UnitFacts("b", False, {torch.float32: 16}),
        UnitFacts("c", True, {torch.float32: 16}),
    ),
    tuple(
        ParameterFacts(n, name, unit, True) for n, (name, unit) in enumerate((("a", 0), ("b", 1), ("c", 2)))
    ),
)


def graph_of(function: object, *names: str) -> ShardedGraph:
    """`function` traced with 4 × 4 inputs; those called a, b and c are the parameters of these names."""
    module = make_fx(function)(*(torch.ones(4, 4) for _ in names))
    return named(module, *names)


def named(module: fx.GraphModule, *names: str) -> ShardedGraph:
    known = {p.name: p for p in FACTS.parameters}
    for node, name in zip(module.graph.find_nodes(op="placeholder"), names, strict=True):
        node._rename(f"in_{name}")
    return ShardedGraph(module, FACTS, {f"in_{name}": known[name] for name in names if name in known})


def shown(graph: ShardedGraph) -> str:
    graph.finish()
    return text(graph.graph)
