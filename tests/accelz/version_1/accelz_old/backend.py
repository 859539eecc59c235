"""The plugin: a descriptor. It imports no torch and no device library, so `accelz list` stays quick."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from accelz.hooks import BackendDescriptor, Probe, hookimpl

if TYPE_CHECKING:
    from accelz.accelerator import Accelerator

PRIORITY = -1


@hookimpl
def accelz_backend() -> BackendDescriptor:
    return BackendDescriptor("old", 1, PRIORITY, _probe, _load)


def _probe() -> Probe:
    if find_spec("accelz_sim") is None:
        return Probe(False, "the runtime is not installed: pip install accelz-sim")
    return Probe(True, "runtime found")


def _load() -> Accelerator:
    from accelz_old.accelerator import build

    return build()
