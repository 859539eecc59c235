"""The memory role: counters, trimming, page-locked host memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class MemoryStats:
    """Memory of the current device, in bytes.

    allocated: in use now, including memory a stream still works with (`Streams.keep_alive`) if the allocator
    reports it. peak: the most that was allocated since the start or `reset_peak()`. capacity: all that this
    process may use. free: what can still be allocated.
    """

    allocated: int
    peak: int
    capacity: int
    free: int


class Memory(ABC):
    """Device memory: counters and trimming; and host memory that the device copies to and from.

    An allocation that the device has no room for raises torch.OutOfMemoryError, whatever caused it (a new
    tensor, a storage that grows), and changes nothing, so that an engine can make room and try again.
    """

    @abstractmethod
    def stats(self) -> MemoryStats:
        """Return the current counters, in bytes."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Restart `stats().peak` from what is allocated now."""

    def trim(self) -> None:  # noqa: B027 (optional: most devices with a cache override it)
        """Give cached, unused memory back. The default does nothing, for devices without a cache."""

    def empty_host(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised host tensor.

        It is page-locked if the device declares pinned_host_memory: copies to and from it with
        `non_blocking=True` are queued behind the stream's work, and do not block the host.
        """
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
