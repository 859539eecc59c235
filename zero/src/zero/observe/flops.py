"""Floating-point operations of matrix products, convolutions and attention, counted as they are called.

How many a call takes is in torch's own table (`torch.utils.flop_counter`), to which `ATTENTION` adds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count


def _forward(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, _all_heads(key, query), _all_heads(value, query)))


def _backward(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(gradient, query, _all_heads(key, query), _all_heads(value, query)))


def _all_heads(shape: Any, query: Any) -> tuple[int, ...]:
    """With as many heads as the query, which share those of keys and values: torch 2.11 wants them alike."""
    return (shape[0], query[1], *shape[2:])


ATTENTION = {
    getattr(torch.ops.aten, f"_scaled_dot_product_{name}{part}"): formula
    for name in (
        "flash_attention_for_cpu",
        "fused_attention_overrideable",
        "flash_attention",
        "efficient_attention",
        "cudnn_attention",
    )
    for part, formula in (("", _forward), ("_backward", _backward))
}
"""What torch's table lacks, as `FlopCounterMode(custom_mapping=...)` takes it: attention of the host, and of
devices that are not torch's own; in torch 2.11, heads of CUDA's attention that share keys and values."""
_FORMULAS = FlopCounterMode(display=False, custom_mapping=ATTENTION).flop_registry


def operations(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    """Those of one call of an operator; 0 for operators that are not counted."""
    formula = _FORMULAS.get(getattr(func, "overloadpacket", func))
    if formula is None:
        return 0
    count = int(formula(*args, **kwargs, out_val=result))
    return count // 2 if _is_causal(func, args, kwargs) else count


def _is_causal(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    names = [argument.name for argument in func._schema.arguments] if hasattr(func, "_schema") else []
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    return bool(given.get("is_causal", False))
