"""What becomes of parameters beside the engine: written in place, or given other memory.

`parameter.data = ...` leaves a parameter cut off: no gather fills what it shows, and no step changes it. A
write in place, to a unit that is released behind its forward, goes with the bytes; where ranks have memory in
common it reaches them all, in the middle of what they compute.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter

import torch
from torch import Tensor, nn

from zero.errors import ModelError, some

_version = attrgetter("_version")


def versions_of(parameters: Iterable[nn.Parameter]) -> list[int]:
    """How often each was written to; what is written through `.data` is not counted."""
    with torch._C.DisableTorchFunctionSubclass():
        return list(map(_version, parameters))


def elsewhere(parameters: Sequence[nn.Parameter], views: Sequence[Tensor]) -> list[int]:
    """Indices of parameters that are not where their views are."""
    with torch._C.DisableTorchFunctionSubclass():
        here, there = list(map(Tensor.data_ptr, parameters)), list(map(Tensor.data_ptr, views))
    return [] if here == there else [i for i, where in enumerate(here) if where != there[i]]


def written(name: str) -> ModelError:
    """A forward has changed a parameter in place."""
    return ModelError(
        f"the forward writes to parameter {name!r}, which is sharded. Change parameters between "
        "steps, inside `with zero.gathered(parameter, write_rank=0):`"
    )


def replaced(names: Sequence[str]) -> ModelError:
    """Parameters have other memory than the engine's."""
    return ModelError(f"other memory than the engine's is behind {some(names)}. {_REPLACED}")


_REPLACED = (
    "It was replaced: by model.to(...), by an assignment to `.data`, or by flatten_parameters() of an RNN. "
    "Choose dtype and device before zero.initialize, and change values inside `with zero.gathered(...)`"
)
