"""An accelerator for any device type that torch knows, from `torch.get_device_module(type)`.

    def _load() -> Accelerator:
        import torch_foo  # makes "foo" a device of torch, and torch.foo its module
        from accelz.torch_device import TorchAccelerator

        return TorchAccelerator("foo", collectives=Collectives("cpu:gloo,foo:fccl"))

Every role is derived from functions of the device module that torch's own devices share. Pass a role of your
own where the device differs, and the capabilities that the device really has.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, cast

import torch
from torch import Tensor

from accelz.accelerator import Accelerator
from accelz.capabilities import Capabilities
from accelz.collectives import Collectives
from accelz.errors import BackendError, BackendUnavailableError
from accelz.flat_buffer import CopyAndShrink, FlatBufferStrategy, StorageSwap
from accelz.kernels import Kernels
from accelz.memory import Memory, MemoryStats
from accelz.rng import Rng
from accelz.streams import Event, Stream, Streams

TORCH_DEVICE = Capabilities(
    asynchronous=True,
    streams=True,
    pinned_host_memory=True,
    exact_memory=True,
    memory_granularity=2 << 20,  # blocks of its caching allocator
    shared_device=False,
    dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
)
"""What a device of torch's own usually has. `dataclasses.replace` what differs."""


class TorchAccelerator(Accelerator):
    """A device type of torch with roles derived from its module.

    name: the backend's name. collectives: built with the device's communication library, such as
    `Collectives("cpu:gloo,cuda:nccl")`. device_type: torch's name of the device, `name` by default.
    flat_buffers: by default StorageSwap where a device Parameter takes host data, else CopyAndShrink.
    Nothing touches a device before `bind`. Raises BackendError where the module lacks what a derived role
    needs, naming it.
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
        """Take device `local_rank`; where the process sees a single device, that one.

        Raises BackendUnavailableError where there is no device, and for a local rank without one of its own
        unless ranks may share.
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
        self.streams.synchronize()  # the first use of a device takes seconds: now, and not within a timeout


class TorchMemory(Memory):
    """The device's caching allocator. pinned: whether host memory is to be page-locked."""

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
        """Bytes in use, the most that were, and those that the allocator keeps."""
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
    """As `TorchMemory`, in one reading of the allocator's counters.

    What was freed while a stream still works with it is no longer *allocated* in torch's terms, but *active*:
    it cannot be had for anything else, so here it counts. kind: the device's type.
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
        with suppress(torch.OutOfMemoryError):  # who allocates finds out which streams are done by now
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
            f"{module.__name__} has no {', '.join(missing)}: {role} cannot be derived from it; "
            f"add what is missing to the module, or give TorchAccelerator a role of your own"
        )
