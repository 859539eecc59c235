"""One-dimensional values in any tier: a tensor on the device or the host, or a part of a swap file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from zero.communication.communicator import Communicator
from zero.tiers.stored import Stored

Values = Tensor | Stored


class Column(NamedTuple):
    """One of the tensors of a record: values in one dtype, each for `every` elements."""

    dtype: torch.dtype
    every: int = 1

    @property
    def bytes_each(self) -> float:
        """Bytes per element of the record."""
        return self.dtype.itemsize / self.every

    def numel(self, elements: int) -> int:
        """How many values there are beside a record's elements."""
        return -(-elements // self.every)

    def nbytes(self, elements: int) -> int:
        return self.numel(elements) * self.dtype.itemsize

    def window(self, elements: slice) -> slice:
        """The values of a stretch of elements, which begins where one of its values does."""
        return slice(elements.start // self.every, self.numel(elements.stop))


def longest_block(columns: Iterable[Column]) -> int:
    """Return how many elements of a record must stay together, counted from its beginning."""
    return max((column.every for column in columns), default=1)


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
