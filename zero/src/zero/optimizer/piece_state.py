"""What an optimizer keeps of one piece of a parameter: one value per element, or for all of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from zero.optimizer.wrapped_state import is_wrapper, kept_tensors, moved_wrapper
from zero.tiers.values import Stored, Values


def is_elementwise(key: str, value: Values, parameter: nn.Parameter) -> bool:
    """Whether a state tensor of a piece has one value per element, each by itself: blocks of a wrapper share
    scales."""
    if isinstance(value, Stored):
        return True
    return key != "step" and value.shape == parameter.shape and not is_wrapper(value)


def in_memory_order(value: Values, parameter: nn.Parameter) -> Values:
    """A tensor of the parameter's shape as one dimension, in the parameter's memory order. It shares its
    storage if it has the parameter's strides; otherwise it is a copy."""
    if isinstance(value, Stored):
        return value
    if value.stride() != parameter.stride():
        like = torch.empty_strided(
            parameter.shape, parameter.stride(), dtype=value.dtype, device=value.device
        )
        value = like.copy_(value)
    return value.as_strided((value.numel(),), (1,), value.storage_offset())


def tensors_beside(state: dict[str, Any], parameter: nn.Parameter) -> list[Tensor]:
    """The tensors of a state that are kept beside a parameter, including those in lists, dicts and
    wrappers."""
    leaves = ((key, leaf) for key, value in state.items() for leaf in tree_leaves(value))
    beside = (leaf for key, leaf in leaves if isinstance(leaf, Tensor) and _is_beside(key, leaf, parameter))
    return [tensor for leaf in beside for tensor in kept_tensors(leaf)]


def moved(key: str, value: Any, parameter: nn.Parameter, device: torch.device, copy: bool = False) -> Any:
    """A value of a state, with those of its tensors that are kept beside the parameter moved to `device`."""

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if is_wrapper(leaf):
            return moved_wrapper(leaf, device, copy)
        return leaf.to(device if _is_beside(key, leaf, parameter) else leaf.device, copy=copy)

    return tree_map(move, value)


def _is_beside(key: str, leaf: Tensor, parameter: nn.Parameter) -> bool:
    """Whether a tensor is kept beside the parameter. Single numbers stay where optimizers put them, unless
    the parameter itself is one."""
    return leaf.dim() > 0 or (parameter.dim() == 0 and key != "step")
