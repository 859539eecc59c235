"""Attention as it is on a GPU, in segments of a graph: traced with tensors that have no bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from zero.compiled.segments import Segment, cut

aten = torch.ops.aten


def _cut(run: Callable[..., Any], *inputs: Tensor) -> list[Segment]:
    return cut(make_fx(run, tracing_mode="fake")(*inputs), "cuda")


def _attention(query: Tensor, dropout: float) -> Tensor:
    found = aten._scaled_dot_product_flash_attention(query, query, query, dropout, True)
    query_gradient, *_ = aten._scaled_dot_product_flash_attention_backward(
        found[0], query, query, query, *found[:2], None, None, 8, 8, dropout, True, *found[6:8]
    )
    return query_gradient * 2


@pytest.mark.parametrize(("dropout", "draw"), [(0.0, [False]), (0.1, [True, False])])
def test_attention_draws_only_with_dropout(dropout: float, draw: list[bool]) -> None:
    with FakeTensorMode():
        query = torch.empty(2, 2, 8, 16, device="cuda", dtype=torch.bfloat16)
    segments = _cut(lambda query: _attention(query, dropout), query)
    assert [segment.called for segment in segments] == draw
    assert [segment.unread for segment in segments] == [frozenset()] * len(draw)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_states_that_attention_does_not_read(dropout: float) -> None:
    with FakeTensorMode():
        query = torch.empty(2, 2, 8, 16, device="cuda", dtype=torch.bfloat16)
        result, rows, *_ = aten._scaled_dot_product_flash_attention(query, query, query, dropout, True)
        states = torch.empty(2, dtype=torch.uint64, device="cuda"), torch.empty((), device="cuda")

    def backward(query: Tensor, result: Tensor, rows: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        three, limits = (query, query, query), (None, None, 8, 8, dropout, True)
        op = aten._scaled_dot_product_flash_attention_backward
        return op(result, *three, result, rows, *limits, seed, offset)[0] * 2

    (segment,) = _cut(backward, query, result, rows, *states)
    assert len(segment.unread) == (2 if dropout == 0 else 0)
