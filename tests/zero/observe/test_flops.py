"""Operations of attention, which torch does not count where kernels of the host or of a vendor compute it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

from zero.observe.flops import ATTENTION, operations

HEADS, LENGTH, WIDTH = 2, 5, 4
PRODUCT = 2 * HEADS * LENGTH * LENGTH * WIDTH


@pytest.mark.host
def test_attention_of_the_host() -> None:
    """Two products in a forward, and five in a backward."""
    query = torch.ones(1, HEADS, LENGTH, WIDTH, requires_grad=True)
    with FlopCounterMode(display=False, custom_mapping=ATTENTION) as counter:
        out = scaled_dot_product_attention(query, query, query)
    assert counter.get_total_flops() == 2 * PRODUCT
    with FlopCounterMode(display=False, custom_mapping=ATTENTION) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 5 * PRODUCT


@pytest.mark.host
@pytest.mark.parametrize("causal", [False, True])
def test_attention_of_a_vendor(causal: bool) -> None:
    call: Any = torch.ops.aten._scaled_dot_product_fused_attention_overrideable.default
    query = torch.empty(1, HEADS, LENGTH, WIDTH, device="meta")
    given = (query, query, query, None, 0.0, causal)
    assert operations(call, given, {}, call(*given)) == (1 if causal else 2) * PRODUCT
    assert operations(call, given[:3], {"is_causal": causal}, None) == (1 if causal else 2) * PRODUCT


@pytest.mark.host
@pytest.mark.parametrize("kernel", ATTENTION, ids=str)
def test_heads_that_share_keys_and_values(kernel: Any) -> None:
    query, key = (torch.empty(1, heads, LENGTH, WIDTH, device="meta") for heads in (HEADS, 1))
    backward = "backward" in str(kernel)
    given = (query, query, key, key) if backward else (query, key, key)
    assert operations(kernel, given, {}, None) == (5 if backward else 2) * PRODUCT
