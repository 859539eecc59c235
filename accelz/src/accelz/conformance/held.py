"""What a process holds: bytes on the device by the backend's counters, and bytes of host memory."""

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
    """device: allocated bytes. host: resident bytes of this process, 0 where the system does not tell."""

    device: int
    host: int

    @staticmethod
    def now(accelerator: Accelerator) -> Held:
        """What is held once the device is done and everything unused has been given back."""
        gc.collect()
        accelerator.flush()
        accelerator.streams.synchronize()
        accelerator.memory.trim()
        allocated = accelerator.memory.stats().allocated
        if _glibc() is not None:
            _glibc().malloc_trim(0)  # freed blocks of the host go back at once, whatever their size
        return Held(allocated, _resident())

    def beyond(self, before: Held) -> Held:
        """How much more this is."""
        return Held(self.device - before.device, self.host - before.host)


def _resident() -> int:
    if not STATUS.exists():
        return 0
    line = next(row for row in STATUS.read_text().splitlines() if row.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024


@cache
def _glibc() -> Any:
    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None
