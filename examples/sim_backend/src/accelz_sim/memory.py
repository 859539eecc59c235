"""The memory role: counters that are exact to the byte, and page-locked host memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from accelz.memory import Memory, MemoryStats
from accelz_sim import _C


class SimMemory(Memory):
    """Nothing is cached, so what is allocated is what tensors hold, and all that is left is free."""

    def stats(self) -> MemoryStats:
        allocated, peak, capacity = _C.counters(_C.current_device())
        return MemoryStats(allocated, peak, capacity, max(capacity - allocated, 0))

    def reset_peak(self) -> None:
        _C.reset_peak(_C.current_device())

    def empty_host(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)


def set_capacity(nbytes: int) -> None:
    """Let the current device hold `nbytes` bytes; more raises torch.OutOfMemoryError. Default: 2 GiB."""
    _C.set_capacity(_C.current_device(), nbytes)
