"""The plugin: a descriptor, with no torch import before the backend is chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelz import BackendDescriptor, Probe, hookimpl

if TYPE_CHECKING:
    from accelz import Accelerator


@hookimpl
def accelz_backend() -> BackendDescriptor:
    return BackendDescriptor(name="hpu", api_version=2, priority=100, probe=_probe, load=_load)


def _probe() -> Probe:
    from accelz_hpu.probe import probe

    return probe()


def _load() -> Accelerator:
    from accelz_hpu.accelerator import build

    return build()
