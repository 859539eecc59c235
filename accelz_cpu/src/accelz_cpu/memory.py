"""Memory of a CPU process: resident bytes, as the kernel counts them."""

from __future__ import annotations

import ctypes
import platform
from functools import cache
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from accelz.memory import Memory, MemoryStats

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_CGROUP = Path("/sys/fs/cgroup")
_RESET_PEAK = "5"  # proc(5): clear_refs 5 sets VmHWM back to the current resident set


class ProcessMemory(Memory):
    """Resident set of this process and the most it has been.

    Linux keeps the peak (VmHWM) and lets a process reset it. Elsewhere the peak is the largest value that
    `stats()` itself has seen.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._seen = 0

    def trim(self) -> None:
        library = _glibc()
        if library is not None:
            library.malloc_trim(0)

    def stats(self) -> MemoryStats:
        allocated = int(self._process.memory_info().rss)
        self._seen = max(self._seen, allocated)
        peak = max(self._high_water() or self._seen, allocated)
        capacity, taken = _capacity(), max(allocated, _taken())
        free = min(int(psutil.virtual_memory().available), max(capacity - taken, 0))
        return MemoryStats(allocated=allocated, peak=peak, capacity=capacity, free=free)

    def reset_peak(self) -> None:
        self._seen = self._process.memory_info().rss
        if _CLEAR_REFS.exists():
            _CLEAR_REFS.write_text(_RESET_PEAK)

    @staticmethod
    def _high_water() -> int | None:
        if not _STATUS.exists():
            return None
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        return None


def keep_freed_memory() -> None:
    """Let malloc keep what is freed for the next allocation, as an accelerator's allocator does.

    By default glibc hands large blocks back to the kernel, and a training step, which needs the same blocks
    over and over, pays a page fault for every 4 KiB of them. `Memory.trim` gives back what is unused.
    Without glibc, or with another malloc in its place, nothing changes.
    """
    library = _glibc()
    if library is not None:
        library.mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT)
        library.mallopt(_M_TRIM_THRESHOLD, _NEVER)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_LARGEST_KEPT = 1 << 30  # bytes; a larger block gets a mapping of its own and leaves with it
_NEVER = (1 << 31) - 1  # bytes on top of the heap, the most that mallopt takes


@cache
def _glibc() -> Any:
    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None


def _capacity() -> int:
    total = int(psutil.virtual_memory().total)
    limit = _of_cgroup("memory.max")
    return total if limit is None else min(total, limit)


def _taken() -> int:
    """Bytes that all processes of a container have, without what the kernel would drop from its cache."""
    if _of_cgroup("memory.max") is None:
        return 0
    cache = (line.split() for line in _text("memory.stat").splitlines())
    dropped = sum(int(value) for name, value in cache if name in ("inactive_file", "slab_reclaimable"))
    return max((_of_cgroup("memory.current") or 0) - dropped, 0)


def _of_cgroup(file: str) -> int | None:
    """A number; None where there is no limit, or no container."""
    text = _text(file).strip()
    return int(text) if text.isdigit() else None


def _text(file: str) -> str:
    try:
        return (_CGROUP / file).read_text()
    except OSError:
        return ""
