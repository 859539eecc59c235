"""accelz: what a sharded-training engine needs from a device, and nothing else.

    import accelz
    acc = accelz.current()      # the backend named by ACCELZ_DEVICE, else the best one available

Importing this package imports neither torch nor a backend; both are imported with the first name that needs
them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accelz.accelerator import Accelerator
    from accelz.capabilities import Capabilities
    from accelz.collectives import Collectives, Group, Handle
    from accelz.discovery import BackendRow, list_backends
    from accelz.errors import (
        AccelzError,
        BackendError,
        BackendNotFoundError,
        BackendUnavailableError,
        CollectiveError,
        SelectionError,
    )
    from accelz.flat_buffer import CopyAndShrink, FlatBuffer, FlatBufferStrategy, Slot, StorageSwap
    from accelz.hooks import API_VERSION, BackendDescriptor, Probe, hookimpl
    from accelz.kernels import Kernels
    from accelz.memory import Memory, MemoryStats
    from accelz.rng import Rng
    from accelz.selection import current, host_kernels, use
    from accelz.streams import Event, NullStreams, Stream, Streams
    from accelz.updates import AdamWUpdate, LionUpdate, SgdUpdate

_HOME = {  # the module of each public name, imported when the name is first used
    "Accelerator": "accelerator",
    "Capabilities": "capabilities",
    "Collectives": "collectives",
    "Group": "collectives",
    "Handle": "collectives",
    "BackendRow": "discovery",
    "list_backends": "discovery",
    "AccelzError": "errors",
    "BackendError": "errors",
    "BackendNotFoundError": "errors",
    "BackendUnavailableError": "errors",
    "CollectiveError": "errors",
    "SelectionError": "errors",
    "CopyAndShrink": "flat_buffer",
    "FlatBuffer": "flat_buffer",
    "FlatBufferStrategy": "flat_buffer",
    "Slot": "flat_buffer",
    "StorageSwap": "flat_buffer",
    "API_VERSION": "hooks",
    "BackendDescriptor": "hooks",
    "Probe": "hooks",
    "hookimpl": "hooks",
    "Kernels": "kernels",
    "Memory": "memory",
    "MemoryStats": "memory",
    "Rng": "rng",
    "current": "selection",
    "host_kernels": "selection",
    "use": "selection",
    "Event": "streams",
    "NullStreams": "streams",
    "Stream": "streams",
    "Streams": "streams",
    "AdamWUpdate": "updates",
    "LionUpdate": "updates",
    "SgdUpdate": "updates",
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
    "Handle",
    "Kernels",
    "LionUpdate",
    "Memory",
    "MemoryStats",
    "NullStreams",
    "Probe",
    "Rng",
    "SelectionError",
    "SgdUpdate",
    "Slot",
    "StorageSwap",
    "Stream",
    "Streams",
    "current",
    "hookimpl",
    "host_kernels",
    "list_backends",
    "use",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'accelz' has no attribute {name!r}")
    value = getattr(import_module(f"accelz.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
