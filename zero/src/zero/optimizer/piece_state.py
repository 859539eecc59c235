"""What an optimizer keeps of one piece of a parameter: one value per element, or for all of it."""

from __future__ import annotations

from torch import nn

from zero.errors import StateError
from zero.tiers.stored import Stored
from zero.tiers.values import Values


def is_elementwise(key: str, value: Values, parameter: nn.Parameter) -> bool:
    """Whether a state tensor of a piece has one value per element."""
    if isinstance(value, Stored):
        return True
    return key != "step" and value.shape == parameter.shape


def in_memory_order(value: Values, parameter: nn.Parameter) -> Values:
    """A dense tensor as one dimension, in the order of its parameter's memory; shares its storage."""
    if isinstance(value, Stored):
        return value
    if value.stride() != parameter.stride():
        raise StateError("optimizer state with other strides than its parameter cannot be sharded")
    return value.as_strided((value.numel(),), (1,), value.storage_offset())
