"""Detect changes to parameters that bypass the engine: written in place, or given other memory.

`parameter.data = ...` detaches a parameter from the engine: no gather fills its memory, and no step changes
it. A write in place to a unit that is released after its forward is lost with the bytes; if ranks have common
memory it reaches them all, in the middle of their computation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter

import torch
from torch import Tensor, nn

from zero.errors import ModelError, UsageError, some

_version = attrgetter("_version")


def versions_of(parameters: Iterable[nn.Parameter]) -> list[int]:
    """Return how often each parameter was written to; writes through `.data` are not counted."""
    with torch._C.DisableTorchFunctionSubclass():
        return list(map(_version, parameters))


def elsewhere(parameters: Sequence[nn.Parameter], views: Sequence[Tensor]) -> list[int]:
    """Return the indices of parameters that are not at the address of their views."""
    with torch._C.DisableTorchFunctionSubclass():
        here, there = list(map(Tensor.data_ptr, parameters)), list(map(Tensor.data_ptr, views))
    return [] if here == there else [i for i, where in enumerate(here) if where != there[i]]


def written(name: str) -> ModelError:
    """Make the error for a forward that has changed a parameter in place."""
    return ModelError(
        f"the forward writes to parameter {name!r}, which is sharded. Change parameters between "
        "steps, inside `with zero.gathered(parameter, write_rank=0):`"
    )


def replaced(names: Sequence[str]) -> ModelError:
    """Make the error for parameters that have other memory than the engine's."""
    return ModelError(f"the memory of {some(names)} is no longer the engine's. {_REPLACED}")


def reshaped(name: str, before: Tensor, now: Tensor) -> ModelError:
    """Make the error for a parameter that was given values of another shape, dtype or device."""
    return ModelError(
        f"parameter {name!r} was {form_of(before)} at zero.initialize and was given values of "
        f"{form_of(now)}, for which the engine has neither shards nor optimizer state. Resize embeddings, "
        "convert and move the model before zero.initialize; to do so now, take engine.state_dict() and build "
        "model, optimizer and engine anew"
    )


def form_of(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"


def changed_since() -> UsageError:
    """A backward comes to a forward that has computed with other weights."""
    return UsageError(
        "the weights have changed since the forward that this loss comes from, by a step, a load, "
        "refresh_weights or zero.gathered(..., write_rank=...). Its gradients would mix two different "
        "models: run the forward again, then its backward"
    )


_REPLACED = (
    "It was replaced by an assignment to `.data`, torch.utils.swap_tensors or an RNN's flatten_parameters(). "
    "Choose dtype and device before zero.initialize, and change values inside `with zero.gathered(...)`"
)
