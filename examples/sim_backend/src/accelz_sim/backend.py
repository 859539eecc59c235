"""The plugin: a descriptor, with no torch import before the backend is chosen."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from accelz import BackendDescriptor, Probe, hookimpl
from accelz_sim import NAME

if TYPE_CHECKING:
    from accelz import Accelerator

PRIORITY = -100
"""Below 0, the CPU's: a simulation is used only if it is asked for (ACCELZ_DEVICE=sim)."""


@hookimpl
def accelz_backend() -> BackendDescriptor:
    return BackendDescriptor(name=NAME, api_version=2, priority=PRIORITY, probe=_probe, load=_load)


def _probe() -> Probe:
    if find_spec("accelz_sim._C") is None:
        return Probe(False, "accelz_sim._C is not built; see the README of accelz-sim")
    return Probe(True, "simulated in host memory")


def _load() -> Accelerator:
    from accelz_sim.accelerator import build

    return build()
