"""accelz: what a sharded-training engine needs from a device, and nothing else.

    import accelz
    acc = accelz.current()      # the backend named by ACCELZ_DEVICE, else the best one available

Importing this package imports neither torch nor a backend; both are imported with the first name that needs
them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from accelz.version import __version__ as __version__

if TYPE_CHECKING:
    from accelz.accelerator import Accelerator
    from accelz.capabilities import Capabilities
    from accelz.discovery import BackendRow, list_backends
    from accelz.errors import (
        AccelzError,
        BackendError,
        BackendNotFoundError,
        BackendUnavailableError,
        CollectiveError,
        SelectionError,
    )
    from accelz.hooks import API_VERSION, BackendDescriptor, Probe, hookimpl
    from accelz.ranks.group import Group
    from accelz.roles.collectives import Collectives, Handle, ReduceOp
    from accelz.roles.flat_buffer import (
        CopyAndShrink,
        FlatBuffer,
        FlatBufferStrategy,
        Slot,
        StorageSwap,
        dense_stride,
        rebind,
        unshare,
    )
    from accelz.roles.host import HOST
    from accelz.roles.kernels import Kernels
    from accelz.roles.memory import Memory, MemoryStats
    from accelz.roles.rng import Rng
    from accelz.roles.streams import Event, NullStreams, Stream, Streams
    from accelz.roles.updates import AdamWUpdate, LionUpdate, SgdUpdate, Update
    from accelz.selection import current, host_kernels, use

_HOME = {  # the module of each public name, imported when the name is first used
    "Accelerator": "accelerator",
    "Capabilities": "capabilities",
    "Collectives": "roles.collectives",
    "Group": "ranks.group",
    "Handle": "roles.collectives",
    "ReduceOp": "roles.collectives",
    "BackendRow": "discovery",
    "list_backends": "discovery",
    "AccelzError": "errors",
    "BackendError": "errors",
    "BackendNotFoundError": "errors",
    "BackendUnavailableError": "errors",
    "CollectiveError": "errors",
    "SelectionError": "errors",
    "CopyAndShrink": "roles.flat_buffer",
    "FlatBuffer": "roles.flat_buffer",
    "FlatBufferStrategy": "roles.flat_buffer",
    "Slot": "roles.flat_buffer",
    "StorageSwap": "roles.flat_buffer",
    "dense_stride": "roles.flat_buffer",
    "rebind": "roles.flat_buffer",
    "unshare": "roles.flat_buffer",
    "HOST": "roles.host",
    "API_VERSION": "hooks",
    "BackendDescriptor": "hooks",
    "Probe": "hooks",
    "hookimpl": "hooks",
    "Kernels": "roles.kernels",
    "Memory": "roles.memory",
    "MemoryStats": "roles.memory",
    "Rng": "roles.rng",
    "current": "selection",
    "host_kernels": "selection",
    "use": "selection",
    "Event": "roles.streams",
    "NullStreams": "roles.streams",
    "Stream": "roles.streams",
    "Streams": "roles.streams",
    "AdamWUpdate": "roles.updates",
    "LionUpdate": "roles.updates",
    "SgdUpdate": "roles.updates",
    "Update": "roles.updates",
}

__all__ = [
    "API_VERSION",
    "Accelerator",
    "AccelzError",
    "AdamWUpdate",
    "BackendDescriptor",
    "BackendError",
    "BackendNotFoundError",
    "BackendRow",
    "BackendUnavailableError",
    "Capabilities",
    "CollectiveError",
    "Collectives",
    "CopyAndShrink",
    "Event",
    "FlatBuffer",
    "FlatBufferStrategy",
    "Group",
    "HOST",
    "Handle",
    "Kernels",
    "LionUpdate",
    "Memory",
    "MemoryStats",
    "NullStreams",
    "Probe",
    "ReduceOp",
    "Rng",
    "SelectionError",
    "SgdUpdate",
    "Slot",
    "StorageSwap",
    "Stream",
    "Streams",
    "Update",
    "current",
    "dense_stride",
    "hookimpl",
    "host_kernels",
    "list_backends",
    "rebind",
    "unshare",
    "use",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'accelz' has no attribute {name!r}")
    value = getattr(import_module(f"accelz.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
