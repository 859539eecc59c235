"""`torch.accelerator`'s functions, on the accelerator that accelz has chosen.

    from accelz import face as accelerator
    accelerator.synchronize()
    print(accelerator.memory_allocated())

For code that is written against `torch.accelerator`, on any backend: a host, or a device whose extension
implements nothing for torch's own functions. Streams are not among them: they are `current().streams`. A
process uses one device, so other devices than that are refused with ValueError.
"""

from __future__ import annotations

import torch
from torch import Tensor

from accelz.errors import BackendUnavailableError
from accelz.roles.memory import MemoryStats
from accelz.selection import current

Device = torch.device | str | int | None


def is_available() -> bool:
    """Whether there is a device to use: not where no backend can be used here."""
    return device_count() > 0


def device_count() -> int:
    """The number of devices of the chosen type that this process sees; 0 where no backend can be used."""
    try:
        return current().device_count()
    except BackendUnavailableError:
        return 0


def current_accelerator(check_available: bool = False) -> torch.device | None:
    """The device's type, without a number; None if `check_available` and there is none."""
    return None if check_available and not is_available() else torch.device(current().device.type)


def current_device_index() -> int:
    return current().device.index or 0


def set_device_index(device: Device, /) -> None:
    """Bind the process to a device, by its number; a negative one does nothing, as torch's does not. Raises
    ValueError if there is no such device."""
    index = _index(device)
    if index >= device_count():
        raise ValueError(f"there is no device {device!r}: this process sees {device_count()}, counted from 0")
    if index >= 0:
        current().bind(index)


def synchronize(device: Device = None, /) -> None:
    """Block the host until the device has finished everything."""
    _check(device)
    accelerator = current()
    accelerator.flush()
    accelerator.streams.synchronize()


def memory_allocated(device: Device = None, /) -> int:
    """Bytes in use."""
    return _stats(device).allocated


def max_memory_allocated(device: Device = None, /) -> int:
    """The most bytes that were in use since the start or `reset_peak_memory_stats`."""
    return _stats(device).peak


def get_memory_info(device: Device = None, /) -> tuple[int, int]:
    """Bytes that can still be allocated, and all bytes that this process may use."""
    stats = _stats(device)
    return stats.free, stats.capacity


def reset_peak_memory_stats(device: Device = None, /) -> None:
    _check(device)
    current().memory.reset_peak()


def empty_cache() -> None:
    """Give cached, unused memory back."""
    current().memory.trim()


def manual_seed(seed: int) -> None:
    """Seed the default generator of the device."""
    current().rng.seed(seed)


def get_rng_state(device: Device = None) -> Tensor:
    """The state of the device's default generator, a uint8 tensor on the host."""
    _check(device)
    return current().rng.get_state()


def set_rng_state(state: Tensor, device: Device = None) -> None:
    _check(device)
    current().rng.set_state(state)


def _stats(device: Device) -> MemoryStats:
    _check(device)
    return current().memory.stats()


def _check(device: Device) -> None:
    if device is not None and _index(device) != current_device_index():
        raise ValueError(
            f"device {device!r} is not this process's, {current().device}: a process uses the device that it "
            "is bound to"
        )


def _index(device: Device) -> int:
    """The number of a device, which is of the chosen type. None, or no number, is the current one."""
    if isinstance(device, int):
        return device
    own = current().device  # first: torch knows a vendor's name once its backend is there
    given = own if device is None else torch.device(device)
    if given.type != own.type:
        raise ValueError(f"device {device!r} is not of the chosen type, {own.type!r}")
    return current_device_index() if given.index is None else given.index
