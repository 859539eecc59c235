"""Backends written for the version of the interface before this one: what has changed since is put right.

Version 2 differs from version 1, that of accelz 0.1, in three things:

- Modules moved into packages: `accelz.kernels` is `accelz.roles.kernels`, and so on.
- An optimizer's kernel takes one value, an `Update`, instead of its tensors and numbers one by one.
- `Capabilities()` declares nothing, and in version 1 it declared what `CapabilitiesOfVersion1` does.

This module knows these and is removed with version 1; docs/api-stability.md says when.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from accelz.hooks import API_VERSION, BackendDescriptor

if TYPE_CHECKING:
    from accelz.accelerator import Accelerator

MOVED = {
    "collectives": "roles.collectives",
    "flat_buffer": "roles.flat_buffer",
    "host_staged": "gloo.host_staged",
    "kernels": "roles.kernels",
    "memory": "roles.memory",
    "rng": "roles.rng",
    "streams": "roles.streams",
}
"""Modules of version 1, and where what they had is now."""


def adapted(descriptor: BackendDescriptor) -> BackendDescriptor:
    """The descriptor with a `load` for this version of the interface. The modules of version 1 are there from
    now on, for its probe too."""
    if descriptor.api_version == API_VERSION:
        return descriptor
    for old, new in MOVED.items():
        if f"accelz.{old}" not in sys.modules:
            module = _module(old, new)
            sys.modules[module.__name__] = module
            setattr(sys.modules["accelz"], old, module)
    return replace(descriptor, load=partial(_load, descriptor.load))


def _load(load: Callable[[], Accelerator]) -> Accelerator:
    with _names_of_version_1():
        return load()


def _module(old: str, new: str) -> ModuleType:
    """A module that has the names of another, which is imported when one is used: most import torch."""

    def get(name: str) -> Any:
        if (old, name) == ("kernels", "Kernels"):
            return _kernels()
        found = import_module(f"accelz.{new}")
        if name == "__all__":  # of a star import
            return [each for each in vars(found) if not each.startswith("_")]
        return getattr(found, name)

    module = ModuleType(f"accelz.{old}")
    module.__dict__["__getattr__"] = get
    return module


@contextmanager
def _names_of_version_1() -> Iterator[None]:
    """For a backend that is imported meanwhile, accelz's names are those of version 1 where these differ."""
    accelz, capabilities = sys.modules["accelz"], import_module("accelz.capabilities")
    for own in (
        "accelerator",
        "torch_device",
    ):  # accelz's own users of these names, which keep this version's
        import_module(f"accelz.{own}")
    declared = import_module("accelz.earlier_capabilities").CapabilitiesOfVersion1
    changes: list[tuple[ModuleType, str, Any]]
    changes = [(capabilities, "Capabilities", declared), (accelz, "Capabilities", declared)]
    changes.append((accelz, "Kernels", _kernels()))
    kept = [(module, name, getattr(module, name)) for module, name, _ in changes]
    try:
        for module, name, value in changes:
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in kept:
            setattr(module, name, value)


def _kernels() -> Any:
    from accelz.earlier_kernels import KernelsOfVersion1

    return KernelsOfVersion1
