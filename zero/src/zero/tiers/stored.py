"""Values that are not in memory, and the operations on them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NoReturn, SupportsIndex

import torch
from torch import Tensor

from accelz import HOST
from zero.errors import UsageError


class Stored(ABC):
    """One-dimensional values that must be read to be used.

    Slices are stored values, too; there is no arithmetic. dtype: that of the values when read.
    """

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._numel = numel

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise UsageError(
            "values on disk cannot be pickled or copied: engine.save_checkpoint saves them, and "
            "engine.full_optimizer_state(name) returns those of a parameter"
        )

    def numel(self) -> int:
        return self._numel

    def element_size(self) -> int:
        return self.dtype.itemsize

    def __getitem__(self, window: slice) -> Stored:
        begin, end, step = window.indices(self._numel)
        if step != 1:
            raise ValueError("stored values can only be sliced with step 1")
        return self.part(begin, max(end, begin))

    def to(self, device: torch.device) -> Tensor:
        """Return a copy on `device`, shape (numel,)."""
        return self.read().to(device)

    def read(self) -> Tensor:
        """Return a copy in host memory, shape (numel,)."""
        values = torch.empty(self._numel, dtype=self.dtype, device=HOST)
        self.read_into(values)
        return values

    @abstractmethod
    def read_into(self, out: Tensor) -> None:
        """Fill `out`, contiguous, of this dtype, in host memory."""

    @abstractmethod
    def write(self, values: Tensor) -> None:
        """Overwrite with `values`, (numel,), from any device and of any dtype."""

    @abstractmethod
    def part(self, begin: int, end: int) -> Stored:
        """Return the values from `begin` up to `end`."""
