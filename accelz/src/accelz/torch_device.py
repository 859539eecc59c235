"""An accelerator for any device type that torch knows, from `torch.get_device_module(type)`.

    def _load() -> Accelerator:
        import torch_foo  # makes "foo" a device of torch, and torch.foo its module
        from accelz.torch_device import TorchAccelerator

        return TorchAccelerator("foo", collectives=Collectives("cpu:gloo,foo:fccl"))

Every role is derived from functions of the device module that torch's own devices share. Pass your own role
where the device differs, and pass the capabilities that the device really has.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, cast

import torch
from torch import Tensor

from accelz.accelerator import Accelerator
from accelz.capabilities import Capabilities
from accelz.errors import BackendError, BackendUnavailableError
from accelz.roles.collectives import Collectives
from accelz.roles.flat_buffer import CopyAndShrink, FlatBufferStrategy, StorageSwap
from accelz.roles.kernels import Kernels
from accelz.roles.memory import Memory, MemoryStats
from accelz.roles.rng import Rng
from accelz.roles.streams import Event, Stream, Streams

TORCH_DEVICE = Capabilities(
    asynchronous=True,
    streams=True,
    pinned_host_memory=True,
    exact_memory=True,
    memory_granularity=2 << 20,  # blocks of its caching allocator
    shared_device=False,
    dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
)
"""What a device built into torch usually has. Use `dataclasses.replace` for what differs."""


class TorchAccelerator(Accelerator):
    """A device type of torch, with roles derived from its device module.

    name: the backend's name. collectives: built with the device's communication library, such as
    `Collectives("cpu:gloo,cuda:nccl")`. device_type: torch's name for the device, `name` by default.
    flat_buffers: by default StorageSwap if a device Parameter may be given host data, else CopyAndShrink.
    Nothing touches a device before `bind`. Raises BackendError if the module lacks what a derived role needs,
    and says what is missing.
    """

    def __init__(
        self,
        name: str,
        collectives: Collectives,
        *,
        device_type: str | None = None,
        capabilities: Capabilities = TORCH_DEVICE,
        memory: Memory | None = None,
        streams: Streams | None = None,
        rng: Rng | None = None,
        flat_buffers: FlatBufferStrategy | None = None,
        kernels: Kernels | None = None,
    ) -> None:
        device = torch.device(device_type or name, 0)
        self.module: Any = torch.get_device_module(device.type)
        _require(self.module, ("device_count", "set_device"), "bind and device_count")
        strategy = StorageSwap if capabilities.host_data_assignment else CopyAndShrink
        super().__init__(
            name=name,
            device=device,
            capabilities=capabilities,
            memory=memory or TorchMemory(self.module, capabilities.pinned_host_memory),
            streams=streams or TorchStreams(self.module),
            rng=rng or TorchRng(self.module),
            collectives=collectives,
            flat_buffers=flat_buffers or strategy(device),
            kernels=kernels or Kernels(),
        )

    def device_count(self) -> int:
        return int(self.module.device_count())

    def bind(self, local_rank: int) -> None:
        """Take the device `local_rank`, or the only device if the process sees a single one.

        Raises BackendUnavailableError if there is no device, or none for this local rank, unless ranks may
        share devices.
        """
        count = self.device_count()
        if not count or (local_rank >= count > 1 and not self.capabilities.shared_device):
            raise BackendUnavailableError(
                f"local rank {local_rank} has no {self.device.type} device: this process sees {count}. "
                "Start at most one rank per device (torchrun --nproc-per-node)"
            )
        index = local_rank % count
        self.module.set_device(index)
        self.device = torch.device(self.device.type, index)
        self.flat_buffers.device = self.device
        self.streams.synchronize()  # the first use of a device takes seconds: now, outside any timeout


class TorchMemory(Memory):
    """The device's caching allocator. pinned: whether to page-lock host memory."""

    NEEDS: tuple[str, ...] = ("memory_allocated", "max_memory_allocated", "memory_reserved", "mem_get_info",
                              "reset_peak_memory_stats", "empty_cache")  # fmt: skip

    def __init__(self, module: Any, pinned: bool) -> None:
        _require(module, self.NEEDS, "memory")
        self._module = module
        self._pinned = pinned

    def stats(self) -> MemoryStats:
        unallocated, capacity = self._module.mem_get_info()
        allocated, peak, reserved = self._counters()
        free = int(unallocated) + reserved - allocated
        return MemoryStats(allocated, peak, int(capacity), min(free, int(capacity)))

    def _counters(self) -> tuple[int, int, int]:
        """Return the bytes in use, their peak, and the bytes that the allocator has reserved."""
        names = ("memory_allocated", "max_memory_allocated", "memory_reserved")
        allocated, peak, reserved = (int(getattr(self._module, name)()) for name in names)
        return allocated, peak, reserved

    def reset_peak(self) -> None:
        self._module.reset_peak_memory_stats()

    def trim(self) -> None:
        self._module.empty_cache()

    def empty_host(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=self._pinned)


class ActiveMemory(TorchMemory):
    """`TorchMemory` that also counts freed memory a stream still works with, and reads the counters once.

    In torch's terms such memory is no longer *allocated* but still *active*: it cannot be used for anything
    else, so it counts here. kind: the device's type.
    """

    NEEDS = ("memory_stats_as_nested_dict", "mem_get_info", "reset_peak_memory_stats", "empty_cache")

    def __init__(self, module: Any, kind: str, pinned: bool) -> None:
        super().__init__(module, pinned)
        self._device = torch.device(kind)

    def _counters(self) -> tuple[int, int, int]:
        counters = self._module.memory_stats_as_nested_dict()
        if not counters:  # nothing was ever allocated
            return 0, 0, 0
        active, reserved = counters["active_bytes"]["all"], counters["reserved_bytes"]["all"]
        return int(active["current"]), int(active["peak"]), int(reserved["current"])

    def reset_peak(self) -> None:
        with suppress(torch.OutOfMemoryError):  # makes the allocator ask which streams are done
            torch.empty(1, dtype=torch.uint8, device=self._device)
        super().reset_peak()


class TorchEvent(Event):
    """A recorded event of the device module, with timing."""

    __slots__ = ("native",)

    def __init__(self, native: Any) -> None:
        self.native = native

    def done(self) -> bool:
        return bool(self.native.query())

    def synchronize(self) -> None:
        self.native.synchronize()

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, TorchEvent)
        earlier.native.synchronize()
        self.native.synchronize()
        return float(earlier.native.elapsed_time(self.native)) / 1e3


class TorchStream(Stream):
    """A stream of the device module."""

    __slots__ = ("_new_event", "native")

    def __init__(self, native: Any, new_event: Any) -> None:
        self.native = native
        self._new_event = new_event

    def record(self) -> Event:
        event = self._new_event(enable_timing=True)
        event.record(self.native)
        return TorchEvent(event)

    def wait(self, event: Event) -> None:
        assert isinstance(event, TorchEvent)
        self.native.wait_event(event.native)


class TorchStreams(Streams):
    """The device module's streams and events."""

    NEEDS: tuple[str, ...] = ("Stream", "Event", "current_stream", "stream", "synchronize")

    def __init__(self, module: Any) -> None:
        _require(module, self.NEEDS, "streams")
        self._module = module

    def current(self) -> Stream:
        return TorchStream(self._module.current_stream(), self._module.Event)

    def new(self, priority: int = 0) -> Stream:
        return TorchStream(self._module.Stream(priority=priority), self._module.Event)

    def use(self, stream: Stream) -> AbstractContextManager[None]:
        assert isinstance(stream, TorchStream)
        return cast(AbstractContextManager[None], self._module.stream(stream.native))

    def keep_alive(self, tensor: Tensor, stream: Stream) -> None:
        assert isinstance(stream, TorchStream)
        tensor.record_stream(stream.native)

    def synchronize(self) -> None:
        self._module.synchronize()


class TorchRng(Rng):
    """The default generator of the current device."""

    NEEDS: tuple[str, ...] = ("manual_seed", "get_rng_state", "set_rng_state")

    def __init__(self, module: Any) -> None:
        _require(module, self.NEEDS, "rng")
        self._module = module

    def seed(self, seed: int) -> None:
        self._module.manual_seed(seed)

    def get_state(self) -> Tensor:
        return cast(Tensor, self._module.get_rng_state())

    def set_state(self, state: Tensor) -> None:
        self._module.set_rng_state(state)


def _require(module: Any, names: Sequence[str], role: str) -> None:
    missing = [name for name in names if not hasattr(module, name)]
    if missing:
        raise BackendError(
            f"{module.__name__} has no {', '.join(missing)}: {role} cannot be derived from it; add what is "
            "missing to the module, or pass TorchAccelerator your own role"
        )
