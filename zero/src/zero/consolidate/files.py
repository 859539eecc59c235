"""What consolidating needs of the file system besides what saving does. Tests replace it to inject faults."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from zero.checkpoint.storage import File, Storage

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


class WeightStorage(Storage):
    """Methods raise OSError as the operating system does."""

    def reopen(self, path: Path) -> File:
        """An existing file for writing, through the page cache."""
        return File(path, os.open(path, os.O_WRONLY | os.O_CLOEXEC))

    def exchange(self, first: Path, second: Path) -> bool:
        """Swap two directories in one step; False where the system cannot."""
        rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
        if rename is None:
            return False
        names = _AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second)
        return bool(rename(*names, _RENAME_EXCHANGE) == 0)

    def forget(self, path: Path) -> None:
        """Let the next read of a file come from the disk and not from the cache, where that can be had."""
        if hasattr(os, "posix_fadvise"):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


WEIGHTS = WeightStorage()
