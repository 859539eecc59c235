"""The pluggy side of accelz: one hook, which every backend answers with a descriptor.

pluggy serves registration only. Training calls plain methods of the `Accelerator` that a descriptor loads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from accelz.accelerator import Accelerator

PROJECT = "accelz"
ENTRY_POINT_GROUP = "accelz.backends"
API_VERSION = 2
"""Version of this accelz's interface. A backend declares the version it was written for."""
OLDEST_API_VERSION = API_VERSION - 1
"""The oldest version whose backends are taken, by way of `accelz.earlier`: docs/api-stability.md."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@dataclass(frozen=True)
class Probe:
    """Whether a device can be used here, and why or why not (one line, for people)."""

    available: bool
    reason: str


@dataclass(frozen=True)
class BackendDescriptor:
    """What a backend says about itself before any device library is imported.

    name: the value of ACCELZ_DEVICE that selects it; must equal the entry point's name.
    api_version: the `accelz.API_VERSION` the backend was written for; the one before it is taken too.
    priority: when ACCELZ_DEVICE is unset, the available backend with the highest one wins (cpu has 0, devices
        100). A backend with a priority below 0, such as a simulation, is used only when asked for.
    probe: cheap, repeatable, safe before and after fork; imports the device library only if it must.
    load: builds the accelerator; called once per process, after the choice is made.
    host: the backend's device is host memory, and its kernels work on what other devices keep there.
    """

    name: str
    api_version: int
    priority: int
    probe: Callable[[], Probe]
    load: Callable[[], Accelerator]
    host: bool = False


@hookspec
def accelz_backend() -> BackendDescriptor:  # type: ignore[empty-body]
    """Return this backend's descriptor without importing its device library."""
