"""torch's functions for a device type: those of its own module, and of `torch.accelerator` where it has none.

Devices built into torch have a module with streams, events, memory counters and a generator. A vendor's need
not: what its native half implements is reached by `torch.accelerator`, `torch.Stream` and `torch.Event`, if
it is the accelerator of this process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch

from accelz.errors import BackendError

_RENAMED = {"mem_get_info": "get_memory_info", "set_device": "set_device_index"}
"""Names in torch.accelerator that differ from those in device modules."""


class DeviceFunctions:
    """The functions of a device type, by the names that torch's own device modules have.

    kind: torch's name for the device, such as "cuda". Raises BackendError if torch does not know it.
    """

    def __init__(self, kind: str) -> None:
        try:
            self._module: Any = torch.get_device_module(kind)
        except RuntimeError as error:
            raise BackendError(
                f"torch knows no device module called {kind!r}: import the library that registers it, or "
                f"register it with accelz.torch_device.name_device({kind!r}, module)"
            ) from error
        self._kind = kind
        accelerator = torch.accelerator.current_accelerator()
        self._is_accelerator = accelerator is not None and accelerator.type == kind
        self.__name__ = str(self._module.__name__)

    def __getattr__(self, name: str) -> Any:
        if hasattr(self._module, name) or not self._is_accelerator:
            return getattr(self._module, name)
        return self._of_torch(name)

    def generic(self, names: Sequence[str]) -> bool:
        """Whether any of `names` comes from `torch.accelerator`: there, a device may not implement it."""
        return not all(hasattr(self._module, name) for name in names)

    def _of_torch(self, name: str) -> Any:
        if name in ("Stream", "Event"):
            return partial(self._on_current, getattr(torch, name))
        if name == "stream":
            return _itself
        return getattr(torch.accelerator, _RENAMED.get(name, name))

    def _on_current(self, make: Any, **options: Any) -> Any:
        """A stream or an event on the current device, whose index torch's guards need."""
        return make(torch.device(self._kind, torch.accelerator.current_device_index()), **options)


def require(module: Any, needs: Mapping[str, Sequence[str]]) -> None:
    """Check that roles can be derived from a device module.

    needs: the functions of each role. Raises BackendError that names all that is missing, of all roles.
    """
    lacking = {role: [n for n in names if not hasattr(module, n)] for role, names in needs.items()}
    missing = [f"{', '.join(n)}: {role} cannot be derived from it" for role, n in lacking.items() if n]
    if missing:
        raise BackendError(
            f"{module.__name__} has no {'; no '.join(missing)}. Add what is missing to the module, implement "
            "it for torch.accelerator, or pass TorchAccelerator your own role"
        )


def name_device(kind: str, module: ModuleType) -> None:
    """Make an extension's device known to torch as `kind`, with `module` as `torch.<kind>`.

    For a library that, when it is imported, only loads its native half (of the device type PrivateUse1).
    Nothing changes where it has done this itself. Raises BackendError if another device has the type.
    """
    if _known(kind):
        return
    owner = torch._C._get_privateuse1_backend_name()
    if owner not in ("privateuseone", kind):
        raise BackendError(
            f"{kind!r} cannot be a device of this process: torch has one place for a vendor's device, and "
            f"{owner!r} has taken it. Keep the library of {owner!r} from being imported here"
        )
    if owner != kind:
        torch.utils.rename_privateuse1_backend(kind)
    torch._register_device_module(kind, module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)


def _known(kind: str) -> bool:
    try:
        torch.get_device_module(kind)
    except RuntimeError:
        return False
    return True


def _itself(stream: Any) -> Any:
    """torch's streams are context managers."""
    return stream
