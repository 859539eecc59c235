"""What of a graph becomes a segment that a device graph can hold, and what is called between segments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from zero.compiled.segments import Segment, cut

aten = torch.ops.aten


def _kinds(module: fx.GraphModule) -> list[str]:
    """What is called, in order: "segment", or an operation."""
    nodes = [node for node in module.graph.nodes if node.op in ("call_module", "call_function")]
    names = ("segment" if n.op == "call_module" else getattr(n.target, "__name__", "") for n in nodes)
    return [name for name in names if name != "getitem"]


def _cut(run: Callable[..., Any], *inputs: Tensor) -> tuple[fx.GraphModule, list[Segment]]:
    module = make_fx(run, tracing_mode="fake")(*inputs)
    return module, cut(module, inputs[0].device.type)


def between(x: Tensor, y: Tensor) -> Tensor:
    turned = (x + 1).t()
    aten.copy_(y, turned.sin())
    return (turned * 2).cos() + y


def reading(x: Tensor) -> Tensor:
    return x[x.exp() > 1].sum() * 2 + x.sum()


def drawing(x: Tensor) -> tuple[Tensor, Tensor]:
    found = aten.native_dropout(x.sin(), 0.5, True)
    return found[0].t().cos(), found[1]


CASES: list[tuple[Callable[..., Any], list[str]]] = [
    (between, ["segment", "copy_.default", "segment"]),
    (reading, ["segment", "index.Tensor", "segment"]),
    (drawing, ["segment", "segment", "segment"]),
]


@pytest.mark.parametrize(("run", "kinds"), CASES)
def test_a_graph_is_cut(run: Callable[..., Any], kinds: list[str]) -> None:
    """It computes what it did, and what reads a view of another segment's result makes it again."""
    inputs = [torch.randn(3, 3) for _ in range(run.__code__.co_argcount)]
    module, _ = _cut(run, *inputs)
    assert _kinds(module) == kinds
    torch.manual_seed(1)
    want = run(*(each.clone() for each in inputs))
    torch.manual_seed(1)
    found = module(*inputs)
    assert all(map(torch.equal, *((each,) if isinstance(each, Tensor) else each for each in (found, want))))
