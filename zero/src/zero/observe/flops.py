"""Floating-point operations of matrix products, convolutions and attention, counted as they are called.

How many a call takes is in torch's own table (`torch.utils.flop_counter`), to which `ATTENTION` adds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count


def _forward(*shapes: Any, **_: Any) -> int:
    return int(sdpa_flop_count(*shapes[:3]))


def _backward(*shapes: Any, **_: Any) -> int:
    return int(sdpa_backward_flop_count(*shapes[:4]))


_aten = torch.ops.aten
ATTENTION = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _forward,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _backward,
    _aten._scaled_dot_product_fused_attention_overrideable: _forward,
    _aten._scaled_dot_product_fused_attention_overrideable_backward: _backward,
}
"""What torch's table lacks, as `FlopCounterMode(custom_mapping=...)` takes it: attention of the host, and of
devices that are not torch's own."""
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
