"""One-dimensional values wherever they are: a tensor on the device or the host, or a part of a swap file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from zero.communication.communicator import Communicator
from zero.tiers.stored import Stored

Values = Tensor | Stored


@contextmanager
def lasting() -> Iterator[None]:
    """What is made in the block may be changed in place later, whatever mode its caller is in: an evaluation
    in `torch.inference_mode()` makes tensors that no optimizer may step."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def fetch(values: Values, device: torch.device, communicator: Communicator) -> Tensor:
    """`values.to(device)`; zeros where they cannot be read, which the next agreement tells."""
    with communicator.postponing_disk_errors():
        return values.to(device)
    return torch.zeros(values.numel(), dtype=values.dtype, device=device)


@contextmanager
def changing(values: Values) -> Iterator[Tensor]:
    """The values as a tensor to be written to; those on disk are read, and written when the block is over."""
    if isinstance(values, Tensor):
        yield values
    else:
        copy = values.read()
        yield copy
        values.write(copy)


def put(values: Values, window: slice, source: Tensor) -> None:
    """Overwrite a stretch of values, from any device and dtype."""
    if isinstance(values, Stored):
        values[window].write(source)
    else:
        values[window].copy_(source)
