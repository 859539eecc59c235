"""What a simulated device lets tests do to it, by any backend that offers it.

It is a module `faults` beside the backend's plugin, with the context managers of `accelz_sim.faults`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from accelz import Accelerator
from accelz.discovery import installed


def is_simulated(name: str) -> bool:
    """Whether the backend `name` has such a module."""
    try:
        return find_spec(_module(name)) is not None
    except ModuleNotFoundError:  # its plugin is in no package
        return False


def faults_of(accelerator: Accelerator) -> Any:
    return import_module(_module(accelerator.name))


def capacity(accelerator: Accelerator, nbytes: int) -> AbstractContextManager[None]:
    """Let the device hold `nbytes` bytes, in the block."""
    within: AbstractContextManager[None] = faults_of(accelerator).capacity(nbytes)
    return within


def _module(name: str) -> str:
    (entry,) = installed(name)
    return f"{entry.module.rpartition('.')[0] or entry.module}.faults"
