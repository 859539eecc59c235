"""Which fp32 parameters travel in autocast's dtype while torch.autocast is on.

Those that it would cast before every use: they are cast once, before the gather, and values stay those of
plain autocast. What it reads in fp32 (embeddings, norms), and what nobody can tell from outside, travels as
it is. torch.amp's reference has the operations that autocast casts for.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

_CASTING = (nn.Linear, _ConvNd, nn.MultiheadAttention)


def enabled_dtype(device_type: str) -> torch.dtype | None:
    """What autocast casts to, here and now; None where it is off."""
    if torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return None


def cast_before_use(model: nn.Module) -> set[nn.Parameter]:
    """The matrices that all modules which hold them multiply with."""
    casting, others = set[nn.Parameter](), set[nn.Parameter]()
    for module in model.modules():
        held = [p for p in module._parameters.values() if p is not None]
        (casting if _multiplies(module) else others).update(held)
    return {p for p in casting - others if p.dim() > 1}


def _multiplies(module: nn.Module) -> bool:
    return isinstance(module, _CASTING) or _is_affine(module._parameters)


def _is_affine(parameters: dict[str, nn.Parameter | None]) -> bool:
    """Whether they are a matrix and a bias of its rows or columns: other libraries' Linear layers."""
    if parameters.keys() != {"weight", "bias"}:
        return False
    weight, bias = parameters["weight"], parameters["bias"]
    if weight is None or bias is None:
        return False
    return weight.dim() == 2 and bias.dim() == 1 and bias.numel() in weight.shape
