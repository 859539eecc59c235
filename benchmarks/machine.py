"""Where and when a result was taken."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch

DISTRIBUTIONS = (
    "torch", "triton", "nvidia-nccl-cu13", "accelz-zero", "accelz", "accelz-cpu", "deepspeed",
)  # fmt: skip


def describe() -> dict[str, Any]:
    """Machine, versions, date and command line.

    memory: in bytes. load: the present one-minute average. allocator: the library that LD_PRELOAD puts before
    the system's `malloc`, "" for none.
    """
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]),
        "machine": {
            "cpu": _cpu(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "memory": int(psutil.virtual_memory().total),
            "system": platform.system(),
            "load": round(os.getloadavg()[0], 2),
            "allocator": Path(os.environ.get("LD_PRELOAD", "")).name,
        },
        "versions": {
            "python": platform.python_version(),
            **{name: found for name in DISTRIBUTIONS if (found := _version(name))},
        },
    }


def accelerators() -> str:
    """The accelerator's own name, or "" if torch knows of none. Takes memory there: ask after measuring."""
    if not torch.accelerator.is_available():
        return ""
    kind = torch.accelerator.current_accelerator()
    name_of = getattr(torch.get_device_module(kind), "get_device_name", lambda _: str(kind))
    return f"{torch.accelerator.device_count()} x {name_of(0)}"


def generates_code(device_type: str) -> bool:
    """Whether torch's compiler generates code for a kind of device."""
    from torch._inductor.codegen.common import get_scheduling_for_device, init_backend_registration

    init_backend_registration()
    return get_scheduling_for_device(device_type) is not None


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), platform.processor())


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
