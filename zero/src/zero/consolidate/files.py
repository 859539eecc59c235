"""File operations that consolidating needs beyond those of saving. Tests replace them to inject faults."""

from __future__ import annotations

import ctypes
import os
import shutil
from pathlib import Path

from zero.files.storage import File, Storage

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


class WeightStorage(Storage):
    """The file system. Methods raise OSError as the operating system does."""

    def reopen(self, path: Path) -> File:
        """Open an existing file for writing, through the page cache."""
        return File(path, os.open(path, os.O_WRONLY | os.O_CLOEXEC))

    def keep(self, old: Path, new: Path) -> None:
        """Give a file or a link a second name, or copy it where the file system has no hard links."""
        try:
            os.link(old, new, follow_symlinks=False)
        except OSError:  # a file system without hard links
            shutil.copy2(old, new, follow_symlinks=False)

    def exchange(self, first: Path, second: Path) -> bool:
        """Swap two directories atomically. Returns False if the system cannot."""
        rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
        if rename is None:
            return False
        names = _AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second)
        return bool(rename(*names, _RENAME_EXCHANGE) == 0)


WEIGHTS = WeightStorage()
