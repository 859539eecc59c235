"""The memory a process holds: device bytes, by the backend's counters, and bytes of host memory."""

from __future__ import annotations

import ctypes
import gc
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from accelz.accelerator import Accelerator

STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Held:
    """device: allocated bytes. host: resident bytes of this process, 0 if the system does not tell."""

    device: int
    host: int

    @staticmethod
    def now(accelerator: Accelerator) -> Held:
        """Return what is held once the device is done and all unused memory has been given back."""
        gc.collect()
        accelerator.flush()
        accelerator.streams.synchronize()
        accelerator.memory.trim()
        allocated = accelerator.memory.stats().allocated
        if _glibc() is not None:
            _glibc().malloc_trim(0)  # give freed host memory back at once, whatever the size of the blocks
        return Held(allocated, _resident())

    def beyond(self, before: Held) -> Held:
        """Return how much more this is than `before`."""
        return Held(self.device - before.device, self.host - before.host)


def _resident() -> int:
    if not STATUS.exists():
        return 0
    line = next(row for row in STATUS.read_text().splitlines() if row.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024


@cache
def _glibc() -> Any:
    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None
