"""The memory role: torch.cuda's caching allocator."""

from __future__ import annotations

from contextlib import suppress

import torch

from accelz.torch_device import TorchMemory


class CudaMemory(TorchMemory):
    """As `TorchMemory`, in one reading of the allocator's counters.

    What was freed while a stream still works with it is no longer *allocated* in torch's terms, but *active*:
    it cannot be had for anything else, so here it counts.
    """

    NEEDS = ("memory_stats_as_nested_dict", "mem_get_info", "reset_peak_memory_stats", "empty_cache")

    def _counters(self) -> tuple[int, int, int]:
        counters = self._module.memory_stats_as_nested_dict()
        if not counters:  # nothing was ever allocated
            return 0, 0, 0
        active, reserved = counters["active_bytes"]["all"], counters["reserved_bytes"]["all"]
        return int(active["current"]), int(active["peak"]), int(reserved["current"])

    def reset_peak(self) -> None:
        with suppress(torch.OutOfMemoryError):  # who allocates finds out which streams are done by now
            torch.empty(1, dtype=torch.uint8, device="cuda")
        super().reset_peak()
