"""One-dimensional values in any tier: a tensor on the device or the host, or a part of a swap file."""

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
    """Let tensors made in the block be changed in place later, whatever mode the caller is in.

    In `torch.inference_mode()`, an evaluation would otherwise make tensors that no optimizer may step.
    """
    with torch.inference_mode(False), torch.no_grad():
        yield


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of masters of parameters in `dtype`, and of sums of their gradients."""
    return torch.promote_types(dtype, torch.float32) if dtype.itemsize > 1 else torch.float32


def fetch(values: Values, device: torch.device, communicator: Communicator) -> Tensor:
    """Return `values.to(device)`; zeros if they cannot be read, which the next agreement reports."""
    with communicator.postponing_disk_errors():
        return values.to(device)
    return torch.zeros(values.numel(), dtype=values.dtype, device=device)


@contextmanager
def changing(values: Values) -> Iterator[Tensor]:
    """Yield the values as a tensor to write to; those on disk are read, and written back after the block."""
    if isinstance(values, Tensor):
        yield values
    else:
        copy = values.read()
        yield copy
        values.write(copy)


def put(values: Values, window: slice, source: Tensor) -> None:
    """Overwrite a stretch of values with `source`, of any device and dtype."""
    if isinstance(values, Stored):
        values[window].write(source)
    else:
        values[window].copy_(source)
