"""An accelerator for any device type that torch knows, from `torch.get_device_module(type)`.

    def _load() -> Accelerator:
        import torch_foo  # makes "foo" a device of torch, and torch.foo its module
        from accelz.torch_device import TorchAccelerator

        return TorchAccelerator("foo", collectives=Collectives("cpu:gloo,foo:fccl"))

Every role is derived from functions of the device module that torch's own devices share, and from
`torch.accelerator` where the module lacks them. Pass your own role where the device differs, and pass the
capabilities that the device really has.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from accelz.accelerator import Accelerator
from accelz.capabilities import Capabilities, Scaling
from accelz.device_functions import DeviceFunctions, require
from accelz.device_functions import name_device as name_device
from accelz.errors import BackendError, BackendUnavailableError
from accelz.roles.collectives import Collectives
from accelz.roles.flat_buffer import CopyAndKeep, CopyAndShrink, FlatBufferStrategy, StorageSwap
from accelz.roles.kernels import Kernels
from accelz.roles.memory import Memory, MemoryStats
from accelz.roles.rng import Rng
from accelz.roles.streams import Event, Graph, NullStreams, Stream, Streams

TORCH_DEVICE = Capabilities(
    asynchronous=True,
    streams=True,
    pinned_host_memory=True,
    storage_resize=True,
    host_data_assignment=True,
    async_collectives=True,
    exact_memory=True,
    memory_granularity=2 << 20,  # blocks of its caching allocator
    dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
)
"""What a device built into torch usually has. Use `dataclasses.replace` for what differs."""


class TorchAccelerator(Accelerator):
    """A device type of torch, with roles derived from its device module and `torch.accelerator`.

    name: the backend's name. collectives: built with the device's communication library, such as
    `Collectives("cpu:gloo,cuda:nccl")`. device_type: torch's name for the device, `name` by default.
    capacity: bytes of a device's memory, where torch cannot ask the device. streams: by default NullStreams
    for a device that declares neither `asynchronous` nor `streams`. flat_buffers: by default CopyAndKeep
    without `storage_resize`, else StorageSwap where a Parameter may be given host data, or CopyAndShrink.
    Nothing touches a device before `bind`. Raises BackendError if functions are missing that derived roles
    need, and names all of them.
    """

    def __init__(
        self,
        name: str,
        collectives: Collectives,
        *,
        device_type: str | None = None,
        capabilities: Capabilities = TORCH_DEVICE,
        capacity: int | None = None,
        memory: Memory | None = None,
        streams: Streams | None = None,
        rng: Rng | None = None,
        flat_buffers: FlatBufferStrategy | None = None,
        kernels: Kernels | None = None,
    ) -> None:
        self.module = DeviceFunctions(device_type or name)
        device = torch.device(device_type or name, 0)
        if streams is None and not (capabilities.asynchronous or capabilities.streams):
            streams = NullStreams()
        needs: dict[str, Sequence[str]] = {"bind and device_count": ("device_count", "set_device")}
        needs |= {} if memory else {"memory": TorchMemory.needs(capacity)}
        needs |= {} if streams else {"streams": TorchStreams.NEEDS}
        needs |= {} if rng else {"rng": TorchRng.NEEDS}
        require(self.module, needs)
        self._unproved = [role for role, names in needs.items() if self.module.generic(names)]
        strategy = _strategy(capabilities)
        super().__init__(
            name=name,
            device=device,
            capabilities=capabilities,
            memory=memory or TorchMemory(self.module, capabilities.pinned_host_memory, capacity),
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
        share devices; and BackendError if the device does not implement what `torch.accelerator` passes on.
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
        self._prove()

    def _prove(self) -> None:
        """Use what comes from `torch.accelerator` once: there, only a call shows what a device has."""
        tries: dict[str, Callable[[], Any]] = {
            "memory": self.memory.stats,
            "streams": lambda: self.streams.current().record().synchronize(),
            "rng": self.rng.get_state,
        }
        failed = []
        for role in tries.keys() & set(self._unproved):
            try:
                tries[role]()
            except RuntimeError as error:
                failed.append(f"{role}: {str(error).splitlines()[0].rstrip('.')}")
        if failed:
            raise BackendError(
                f"torch.accelerator does not serve all roles on {self.device}. {'; '.join(sorted(failed))}. "
                "Implement them for the device (c10::DeviceAllocator, c10::impl::DeviceGuardImplInterface), "
                "or pass TorchAccelerator your own role; where only the capacity is unknown, capacity=<bytes>"
            )
        self._unproved = []


def scaling_of(device: str) -> Scaling:
    """The scales that `torch._scaled_mm` takes on a device, by trying them: for a backend's `scaled_mm`.

    On CPUs those of rows are not in torch 2.11, by its sources, and not in every kernel of oneDNN.
    """
    codes = torch.ones(16, 16, device=device).to(torch.float8_e4m3fn)
    tries: dict[Scaling, Tensor] = {"rowwise": torch.ones(16, 1), "tensorwise": torch.ones(())}
    for scaling, scale in tries.items():
        there = scale.to(device)
        with suppress(RuntimeError):
            torch._scaled_mm(codes, codes.t(), there, there.t(), out_dtype=torch.bfloat16)
            return scaling
    return "none"


def _strategy(capabilities: Capabilities) -> type[FlatBufferStrategy]:
    if not capabilities.storage_resize:
        return CopyAndKeep
    return StorageSwap if capabilities.host_data_assignment else CopyAndShrink


class TorchMemory(Memory):
    """The device's caching allocator. pinned: whether to page-lock host memory. capacity: bytes of a device's
    memory; None asks the device.
    """

    NEEDS: tuple[str, ...] = ("memory_allocated", "max_memory_allocated", "memory_reserved", "mem_get_info",
                              "reset_peak_memory_stats", "empty_cache")  # fmt: skip

    def __init__(self, module: Any, pinned: bool, capacity: int | None = None) -> None:
        require(module, {"memory": self.needs(capacity)})
        self._module = module
        self._pinned = pinned
        self._capacity = capacity

    @classmethod
    def needs(cls, capacity: int | None) -> tuple[str, ...]:
        """The functions that the role is derived from, where the device's capacity is given."""
        return tuple(name for name in cls.NEEDS if capacity is None or name != "mem_get_info")

    def stats(self) -> MemoryStats:
        asked = self._module.mem_get_info() if self._capacity is None else None
        allocated, peak, reserved = self._counters()
        unallocated, capacity = asked or (cast(int, self._capacity) - reserved, cast(int, self._capacity))
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


class TorchGraph(Graph):
    """A captured graph of the device module."""

    __slots__ = ("native",)

    def __init__(self, native: Any) -> None:
        self.native = native

    def replay(self) -> None:
        self.native.replay()


class TorchStreams(Streams):
    """The device module's streams, events and graphs."""

    NEEDS: tuple[str, ...] = ("Stream", "Event", "current_stream", "stream", "synchronize")

    def __init__(self, module: Any) -> None:
        require(module, {"streams": self.NEEDS})
        self._module = module
        self._held: list[tuple[Event, Tensor]] = []
        self._holding = threading.Lock()
        self._capturing = threading.local()
        self._one_capture = threading.Lock()
        self._for_captures: Stream | None = None

    def current(self) -> Stream:
        return TorchStream(self._module.current_stream(), self._module.Event)

    def new(self, priority: int = 0) -> Stream:
        return TorchStream(self._module.Stream(priority=priority), self._module.Event)

    def use(self, stream: Stream) -> AbstractContextManager[None]:
        assert isinstance(stream, TorchStream)
        return cast(AbstractContextManager[None], self._module.stream(stream.native))

    def keep_alive(self, tensor: Tensor, stream: Stream) -> None:
        """Have the allocator note it; where the device has no `record_stream`, the tensor is held instead."""
        assert isinstance(stream, TorchStream)
        if _records_streams(tensor.device.type):
            tensor.record_stream(stream.native)
        else:
            self._hold((stream.record(), tensor.detach()))

    def capture(self, run: Callable[[], None]) -> Graph:
        """On a stream for captures, as graphs of torch's devices want it: one, for which libraries then keep
        scratch memory once. One thread captures at a time."""
        if vars(self._capturing):
            raise BackendError("a capture inside a capture: capture one graph after the other")
        native = self._new_graph()
        with self._one_capture:
            if self._for_captures is None:
                self._for_captures = self.new()
            self._record(native, self._for_captures, run)
        return TorchGraph(native)

    def _record(self, native: Any, stream: Stream, run: Callable[[], None]) -> None:
        with self.use(stream):
            self._begin(native)
            self._capturing.graph = native
            try:
                run()
            except BaseException:
                with suppress(RuntimeError):  # of a capture that has failed already
                    native.capture_end()
                raise
            finally:
                del self._capturing.graph
            native.capture_end()

    def _new_graph(self) -> Any:
        """A graph of the device: with `capture_begin`, `capture_end` and `replay`."""
        try:
            return self._module.Graph()
        except (AttributeError, RuntimeError) as error:
            reason = str(error).partition("\n")[0]
            raise BackendError(
                f"{self._module.__name__} has no graphs ({reason}): declare graph_capture=False, give the "
                "module a class `Graph`, or, from torch 2.13 on, implement at::GraphImplInterface"
            ) from error

    def _begin(self, native: Any) -> None:
        native.capture_begin()

    def _hold(self, *held: tuple[Event, Tensor]) -> None:
        """Hold these too, and drop those that the device has done with."""
        with self._holding:
            self._held = [(event, tensor) for event, tensor in self._held if not event.done()] + [*held]

    def synchronize(self) -> None:
        self._module.synchronize()
        if self._held:
            self._hold()


@cache
def _records_streams(kind: str) -> bool:
    """Whether the device has a kernel of its own for `Tensor.record_stream`, not a fallback to the host."""
    key = torch._C._dispatch_key_for_device(kind)
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key("aten::record_stream", key))


class TorchRng(Rng):
    """The default generator of the current device."""

    NEEDS: tuple[str, ...] = ("manual_seed", "get_rng_state", "set_rng_state")

    def __init__(self, module: Any) -> None:
        require(module, {"rng": self.NEEDS})
        self._module = module

    def seed(self, seed: int) -> None:
        self._module.manual_seed(seed)

    def get_state(self) -> Tensor:
        return cast(Tensor, self._module.get_rng_state())

    def set_state(self, state: Tensor) -> None:
        self._module.set_rng_state(state)
