"""Which machine a process is on, and which of its processes speaks of it."""

from __future__ import annotations

import os
import socket
import warnings
from pathlib import Path
from typing import Any

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_PROCESSES = Path("/proc/self/ns/pid")


def machine() -> list[Any]:
    """Return a JSON value that is equal in two processes if and only if they see each other and may open each
    other's shared memory.
    """
    boot = _BOOT.read_text().strip() if _BOOT.exists() else ""
    processes = os.readlink(_PROCESSES) if _PROCESSES.exists() else ""
    return [socket.gethostname(), boot, processes, os.getuid()]


def warn(message: str, category: type[Warning] = UserWarning, stacklevel: int = 1) -> None:
    """Warn of what concerns every rank on this machine alike: only the first of them does, by LOCAL_RANK.

    stacklevel: as for `warnings.warn`.
    """
    if os.environ.get("LOCAL_RANK", "").strip() in ("", "0"):
        warnings.warn(message, category, stacklevel=stacklevel + 1)
