"""The memory role: torch.xpu's caching allocator, also on devices that do not report free memory."""

from __future__ import annotations

from typing import Any

from accelz import MemoryStats
from accelz.ranks import machine
from accelz.torch_device import ActiveMemory


class XpuMemory(ActiveMemory):
    """`ActiveMemory` that also works on devices that do not report free memory.

    These are integrated ones, and those without the driver's system management. For them, `free` is the
    capacity less what this process has in use.
    """

    def __init__(self, module: Any, pinned: bool) -> None:
        super().__init__(module, "xpu", pinned)
        self._tells_free = True

    def stats(self) -> MemoryStats:
        if self._tells_free:
            try:
                return super().stats()
            except RuntimeError as error:
                self._tells_free = False
                machine.warn(
                    f"the device does not report its free memory ({error}); what other processes use is "
                    "counted as free",
                    stacklevel=2,
                )
        allocated, peak, _ = self._counters()
        capacity = int(self._module.get_device_properties().total_memory)
        return MemoryStats(allocated, peak, capacity, max(capacity - allocated, 0))
