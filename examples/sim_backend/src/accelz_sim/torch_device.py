"""Makes "sim" a device of torch: its name, and the module `torch.sim`.

torch looks up these functions by name: seeding, checkpointed recomputation, autocast and `torch.accelerator`
call them. `accelz.torch_device` derives the backend's roles from the rest. Call `register` before creating
the first tensor.
"""

from __future__ import annotations

from types import ModuleType, TracebackType

import torch
from torch import Tensor
from torch.utils.backend_registration import (
    generate_methods_for_privateuse1_backend,
    rename_privateuse1_backend,
)

from accelz_sim import _C, NAME, memory, streams


def register() -> None:
    """Register the device with torch; calling it again has no effect."""
    if hasattr(torch, NAME):
        return
    rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module())
    generate_methods_for_privateuse1_backend(for_storage=True)


class device:
    """Makes a device current inside a with block. index: its number, or -1 for no change."""

    def __init__(self, index: int | str | torch.device) -> None:
        self.index = index_of(index)
        self._before = -1

    def __enter__(self) -> None:
        self._before = _C.exchange_device(self.index)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        _C.exchange_device(self._before)


def index_of(device: int | str | torch.device | None = None) -> int:
    """The number of a device; the current one's for None, -1 or "sim"."""
    if not isinstance(device, int):
        index = None if device is None else torch.device(device).index
        device = -1 if index is None else index
    return _C.current_device() if device < 0 else device


def set_device(device: int | str | torch.device) -> None:
    _C.exchange_device(index_of(device))


def get_rng_state(device: int | str | torch.device = NAME) -> Tensor:
    return _C.default_generator(index_of(device)).get_state()


def set_rng_state(state: Tensor, device: int | str | torch.device = NAME) -> None:
    _C.default_generator(index_of(device)).set_state(state)


def get_generator(device: torch.device) -> torch.Generator:
    """Return the generator, for graphs that recompute random operations if torch has been told that they may
    (`torch._functorch._aot_autograd.utils.register_graphsafe_rng_device_type`)."""
    return _C.default_generator(index_of(device))


def manual_seed(seed: int) -> None:
    _C.default_generator(_C.current_device()).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for index in range(_C.DEVICES):
        _C.default_generator(index).manual_seed(seed)


def _module() -> ModuleType:
    module = ModuleType(f"torch.{NAME}", "The simulated accelerator.")
    names = {
        "_get_generator": get_generator,
        "_initialized": True,
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": lambda: None,
        "Event": streams.Event,
        "Graph": _C.Graph,
        "Stream": streams.Stream,
        "current_device": _C.current_device,
        "current_stream": streams.current_stream,
        "default_generators": tuple(map(_C.default_generator, range(_C.DEVICES))),
        "device": device,
        "device_count": lambda: _C.DEVICES,
        "empty_cache": memory.empty_cache,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "get_rng_state": get_rng_state,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "manual_seed": manual_seed,
        "manual_seed_all": manual_seed_all,
        "max_memory_allocated": memory.max_memory_allocated,
        "mem_get_info": memory.mem_get_info,
        "memory_allocated": memory.memory_allocated,
        "memory_reserved": memory.memory_allocated,
        "reset_peak_memory_stats": memory.reset_peak_memory_stats,
        "set_device": set_device,
        "set_rng_state": set_rng_state,
        "stream": streams.stream,
        "synchronize": lambda device=None: _C.synchronize(),
    }
    for name, value in names.items():
        setattr(module, name, value)
    return module
