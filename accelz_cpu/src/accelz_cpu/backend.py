"""The plugin: a descriptor, with no torch import before the backend is chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelz import BackendDescriptor, Probe, hookimpl

if TYPE_CHECKING:
    from accelz import Accelerator


@hookimpl
def accelz_backend() -> BackendDescriptor:
    return BackendDescriptor(name="cpu", api_version=2, priority=0, probe=_probe, load=_load, host=True)


def _probe() -> Probe:
    return Probe(True, "always available")


def _load() -> Accelerator:
    from accelz_cpu.accelerator import build

    return build()
