"""The memory role: torch.hpu's counters. Its allocator has no cache to empty."""

from __future__ import annotations

from accelz import MemoryStats
from accelz.torch_device import TorchMemory


class HpuMemory(TorchMemory):
    """`memory_stats()` in bytes: Limit (capacity), InUse and MaxInUse, workspaces of graphs included.

    Resetting the peak sets MaxInUse to 0 until the next allocation, so the peak is never below InUse.
    """

    NEEDS = ("memory_stats", "reset_peak_memory_stats")

    def stats(self) -> MemoryStats:
        counters = self._module.memory_stats()
        allocated, capacity = int(counters["InUse"]), int(counters["Limit"])
        peak = max(int(counters["MaxInUse"]), allocated)
        return MemoryStats(allocated, peak, capacity, max(capacity - allocated, 0))

    def trim(self) -> None:
        """Do nothing: there is no empty_cache."""
