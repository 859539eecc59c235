"""The memory role: counters, trimming, page-locked host memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class MemoryStats:
    """Bytes of the current device.

    allocated: in use now, what a stream still works with (`Streams.keep_alive`) included where the
    allocator tells. peak: the most since start or `reset_peak()`. capacity: what this process may use at all.
    free: what can still be allocated.
    """

    allocated: int
    peak: int
    capacity: int
    free: int


class Memory(ABC):
    """An allocation for which the device has no room raises torch.OutOfMemoryError, whatever asked for it (a
    new tensor, a storage that grows), and changes nothing: an engine makes room and tries again.
    """

    @abstractmethod
    def stats(self) -> MemoryStats:
        """Counters now, in bytes."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Make `stats().peak` start again from what is allocated now."""

    def trim(self) -> None:  # noqa: B027 (optional: most devices with a cache override it)
        """Give cached, unused memory back. Nothing to do where nothing is cached."""

    def empty_host(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised host tensor.

        Page-locked where the device declares pinned_host_memory: copies to and from it with
        `non_blocking=True` are queued behind the stream's work, and the host goes on.
        """
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
