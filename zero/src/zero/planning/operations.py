"""Floating-point operations of matrix products, convolutions and attention, counted as they are called.

How many a call takes is in torch's own table (`torch.utils.flop_counter`), which lacks attention as the host
has it, where models run without values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

_aten = torch.ops.aten
_FORMULAS = {
    **flop_registry,
    _aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[
        _aten._scaled_dot_product_flash_attention
    ],
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        _aten._scaled_dot_product_flash_attention_backward
    ],
}


@dataclass(frozen=True, kw_only=True)
class Flops:
    """Floating-point operations of one rank in an optimizer step, all micro-batches together: of matrix
    products, convolutions and attention, of which half counts under a causal mask.

    recomputed: what checkpointing repeats of the forward in the backward.
    """

    forward: int
    backward: int
    recomputed: int

    @property
    def model(self) -> int:
        """The model's own: without those that are recomputed."""
        return self.forward + self.backward

    @property
    def all(self) -> int:
        return self.model + self.recomputed

    def times(self, micro_batches: int) -> Flops:
        return Flops(**{name: micro_batches * count for name, count in asdict(self).items()})


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
