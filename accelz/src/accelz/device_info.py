"""Everything about one accelerator in plain types, for people and for `--json`."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

import torch

from accelz import selection
from accelz.accelerator import Accelerator
from accelz.roles import kernels


def describe(name: str | None) -> dict[str, Any]:
    """Facts about the backend `name`, or about the one chosen by default. Raises AccelzError."""
    return facts(named(name))


def named(name: str | None) -> Accelerator:
    """The accelerator of the backend `name`, or the one chosen by default. Raises AccelzError."""
    return selection.current() if name is None else selection.load_named(name, os.environ)


def facts(accelerator: Accelerator) -> dict[str, Any]:
    """Name, device, capabilities, dtypes, memory (None: unknown until `bind`) and its granularity in
    bytes, and who implements each kernel and role.
    """
    return {
        "name": accelerator.name,
        "device": str(accelerator.device),
        "device_count": accelerator.device_count(),
        "capabilities": accelerator.capabilities.flags(),
        "compile": accelerator.capabilities.compile,
        "scaled_mm": accelerator.capabilities.scaled_mm,
        "dtypes": sorted(str(d).removeprefix("torch.") for d in accelerator.capabilities.dtypes),
        "memory": _memory(accelerator),
        "memory_granularity": accelerator.capabilities.memory_granularity,
        "peak_flops": accelerator.capabilities.peak_flops,
        "link_bandwidth": accelerator.capabilities.link_bandwidth,
        "kernels": {name: accelerator.kernels.origin(name) for name in kernels.NAMES},
        "collectives": f"{_class_name(accelerator.collectives)} ({accelerator.collectives.spec})",
        "flat_buffers": _class_name(accelerator.flat_buffers),
        "streams": _class_name(accelerator.streams),
        "torch": torch.__version__,
    }


def _memory(accelerator: Accelerator) -> dict[str, int] | None:
    """The memory counters, or None if they can be read only after `bind` has taken a device.

    Taking a device just to look at it would fail while a job uses it, and keep a job from starting on it.
    """
    try:
        return asdict(accelerator.memory.stats())
    except Exception:
        return None


def _class_name(role: object) -> str:
    return f"{type(role).__module__}.{type(role).__qualname__}"
