"""accelz: what a sharded-training engine needs from a device, and nothing else.

    import accelz
    acc = accelz.current()      # the backend named by ACCELZ_DEVICE, else the best one available

Importing this package imports neither torch nor a backend; both are imported with the first name that needs
them.

Public are the names in `__all__`, and these modules. Engines and backends import nothing else of accelz;
`scripts/lint_devices.py` checks this of those in this repository.

accelz.dynamic_map           values in 8 bits, a scale for each block: what moments may be kept in
accelz.updates               what an optimizer's step takes, a class for each, and the step in plain torch
accelz.face                  torch.accelerator's functions, on the accelerator that accelz has chosen
accelz.torch_device          an accelerator derived from torch's own module for a device
accelz.gloo                  collectives over gloo, on the host or by way of it
accelz.ranks.bounded_store   the job's store, on which every call has a limit
accelz.ranks.exchange        values that the ranks of a group say to each other
accelz.ranks.peers           which of a group's ranks have ended
accelz.ranks.launcher        torchrun's process
accelz.ranks.machine         which machine a process is on, and warnings that concern all of it
accelz.conformance           the tests of a backend
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

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
        CopyAndKeep,
        CopyAndShrink,
        FlatBuffer,
        FlatBufferStrategy,
        KeptBuffer,
        Slot,
        StorageSwap,
        dense_stride,
        rebind,
        unshare,
    )
    from accelz.roles.host import HOST
    from accelz.roles.kernels import Kernels, check_blocks
    from accelz.roles.memory import Memory, MemoryStats
    from accelz.roles.rng import HostRng, Rng
    from accelz.roles.streams import Event, Graph, NullStreams, Stream, Streams
    from accelz.selection import current, host_collectives, host_kernels, selected, use
    from accelz.version import __version__ as __version__

_NAMES = {  # by the modules that they come from, which are imported when a name of theirs is first used
    "accelerator": "Accelerator",
    "capabilities": "Capabilities",
    "discovery": "BackendRow list_backends",
    "errors": (
        "AccelzError BackendError BackendNotFoundError BackendUnavailableError CollectiveError SelectionError"
    ),
    "hooks": "API_VERSION BackendDescriptor hookimpl Probe",
    "ranks.group": "Group",
    "roles.collectives": "Collectives Handle ReduceOp",
    "roles.flat_buffer": (
        "CopyAndKeep CopyAndShrink dense_stride FlatBuffer FlatBufferStrategy KeptBuffer rebind Slot "
        "StorageSwap unshare"
    ),
    "roles.host": "HOST",
    "roles.kernels": "check_blocks Kernels",
    "roles.memory": "Memory MemoryStats",
    "roles.rng": "HostRng Rng",
    "roles.streams": "Event Graph NullStreams Stream Streams",
    "selection": "current host_collectives host_kernels selected use",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [
    "API_VERSION",
    "Accelerator",
    "AccelzError",
    "BackendDescriptor",
    "BackendError",
    "BackendNotFoundError",
    "BackendRow",
    "BackendUnavailableError",
    "Capabilities",
    "CollectiveError",
    "Collectives",
    "CopyAndKeep",
    "CopyAndShrink",
    "Event",
    "FlatBuffer",
    "FlatBufferStrategy",
    "Graph",
    "Group",
    "HOST",
    "Handle",
    "HostRng",
    "KeptBuffer",
    "Kernels",
    "Memory",
    "MemoryStats",
    "NullStreams",
    "Probe",
    "ReduceOp",
    "Rng",
    "SelectionError",
    "Slot",
    "StorageSwap",
    "Stream",
    "Streams",
    "check_blocks",
    "current",
    "dense_stride",
    "hookimpl",
    "host_collectives",
    "host_kernels",
    "list_backends",
    "rebind",
    "selected",
    "unshare",
    "use",
]


def __getattr__(name: str) -> Any:
    home = "version" if name == "__version__" else _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'accelz' has no attribute {name!r}")
    value = getattr(import_module(f"accelz.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
