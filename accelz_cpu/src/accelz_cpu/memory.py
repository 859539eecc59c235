"""Memory of a CPU process: resident bytes, as the kernel counts them."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from accelz import Memory, MemoryStats

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_CGROUP = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")
_RESET_PEAK = "5"  # proc(5): clear_refs 5 sets VmHWM back to the current resident set


class ProcessMemory(Memory):
    """The resident set size of this process, and its peak.

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
        machine, limits = psutil.virtual_memory(), list(_limits())
        capacity = min([int(machine.total), *(limit for limit, _ in limits)])
        free = min(capacity - allocated, int(machine.available), *(limit - taken for limit, taken in limits))
        return MemoryStats(allocated=allocated, peak=peak, capacity=capacity, free=max(free, 0))

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
    """Make malloc keep freed memory for the next allocation, as an accelerator's allocator does.

    By default glibc gives large blocks back to the kernel, and a training step, which needs the same blocks
    over and over, pays a page fault for every 4 KiB of them. `Memory.trim` gives back unused memory. Without
    glibc, or with another malloc in its place, this has no effect.
    """
    library = _glibc()
    if library is not None:
        library.mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT)
        library.mallopt(_M_TRIM_THRESHOLD, _NEVER)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_LARGEST_KEPT = 1 << 30  # bytes; a larger block gets a mapping of its own, which is unmapped when it is freed
_NEVER = (1 << 31) - 1  # bytes free at the top of the heap; the largest value that mallopt takes


@cache
def _glibc() -> Any:
    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None


@dataclass(frozen=True)
class _Files:
    """The files of one version of control groups.

    root: a folder below _CGROUP. dropped: the entries of memory.stat for memory that the kernel would drop
    from its caches for an allocation.
    """

    root: str
    limit: str
    taken: str
    dropped: tuple[str, ...]


_V1 = _Files("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file",))
_V2 = _Files("", "memory.max", "memory.current", ("inactive_file", "slab_reclaimable"))


def _limits() -> Iterator[tuple[int, int]]:
    """Yield the limit and the usage, in bytes, of each limited control group around this process.

    Without a cgroup namespace of its own (a Slurm step, a systemd scope) a process is in a group below the
    root; with one (a container), the root that it sees is its own group.
    """
    for files, path in _own_groups():
        root = _CGROUP / files.root
        own = root / path
        for group in (own, *own.parents[: len(own.parts) - len(root.parts)]):
            limit = _number(group / files.limit)
            if limit is not None:
                yield limit, _taken(group, files)


def _own_groups() -> list[tuple[_Files, str]]:
    """Return this process's control groups, with the files of their version.

    cgroups(7): /proc/self/cgroup has lines number:controllers:path, without controllers in version 2.
    """
    groups = []
    for line in _text(_OWN_GROUPS).splitlines():
        _, controllers, path = line.split(":", 2)
        parts = [part for part in path.split("/") if part not in ("", "..")]
        if controllers in ("", "memory"):
            groups.append((_V1 if controllers else _V2, "/".join(parts)))
    return groups or [(_V2, "")]


def _taken(group: Path, files: _Files) -> int:
    lines = (line.split() for line in _text(group / "memory.stat").splitlines())
    dropped = sum(int(value) for name, value in lines if name in files.dropped)
    return max((_number(group / files.taken) or 0) - dropped, 0)


def _number(file: Path) -> int | None:
    """Read a number; None if the file has none (there is no limit) or does not exist."""
    text = _text(file).strip()
    return int(text) if text.isdigit() else None


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
