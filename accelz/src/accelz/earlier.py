"""Backends written for the version of the interface before this one: what has changed since is put right.

Version 2 differs from version 1, that of accelz 0.1, in three things:

- Modules moved into packages: `accelz.kernels` is `accelz.roles.kernels`, and so on.
- An optimizer's kernel takes one value, an `Update`, instead of its tensors and numbers one by one.
- `Capabilities()` declares nothing; what a version-1 backend did not write out was what `DECLARED` says.

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
DECLARED = ("storage_resize", "host_data_assignment", "async_collectives", "shared_device")
"""What `Capabilities()` declared in version 1, beside bfloat16."""


def adapted(descriptor: BackendDescriptor) -> BackendDescriptor:
    """The descriptor with a `load` for this version of the interface."""
    if descriptor.api_version == API_VERSION:
        return descriptor
    return replace(descriptor, load=partial(_load, descriptor.load))


def _load(load: Callable[[], Accelerator]) -> Accelerator:
    for old, new in MOVED.items():
        sys.modules.setdefault(f"accelz.{old}", _module(old, new))
    with _names_of_version_1():
        return load()


def _module(old: str, new: str) -> ModuleType:
    module = ModuleType(f"accelz.{old}")
    module.__dict__.update(vars(import_module(f"accelz.{new}")) | {"__name__": module.__name__})
    if old == "kernels":
        module.__dict__["Kernels"] = _kernels()
    return module


@contextmanager
def _names_of_version_1() -> Iterator[None]:
    """For a backend that is imported meanwhile, accelz's names are those of version 1 where these differ."""
    accelz, capabilities = sys.modules["accelz"], import_module("accelz.capabilities")
    torch = import_module("torch")
    dtypes = frozenset({torch.float32, torch.bfloat16})
    declared = partial(capabilities.Capabilities, dtypes=dtypes, **dict.fromkeys(DECLARED, True))
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
