"""What a report is about: the versions of software and driver, and the machine."""

from __future__ import annotations

import platform
from importlib import metadata

import torch

from accelz.discovery import list_backends
from accelz.version import __version__


def versions(device: str) -> dict[str, str]:
    """By name: torch, accelz, the backend's distribution, what its probe says of driver and devices, Python
    and the machine."""
    row = next((row for row in list_backends() if row.name == device), None)
    return {
        "torch": torch.__version__,
        "accelz": __version__,
        "backend": f"{row.distribution} {row.version}" if row else "unknown",
        "driver and devices": row.reason if row else "unknown",
        "pytest": metadata.version("pytest"),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {_release()}, {platform.machine()}, {_processor()}",
    }


def _release() -> str:
    """The system's version, without what its builder adds."""
    return platform.release().partition("-")[0]


def _processor() -> str:
    """The processor's name, where Linux tells, else what Python knows."""
    try:
        with open("/proc/cpuinfo") as file:
            found = next((line for line in file if line.startswith("model name")), "")
    except OSError:
        found = ""
    return found.partition(":")[2].strip() or platform.processor() or "an unknown processor"
