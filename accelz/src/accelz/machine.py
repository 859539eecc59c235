"""Which machine a process is on."""

from __future__ import annotations

import os
import platform
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
    return [platform.node(), boot, processes, os.getuid()]
