"""Broken doubles of sound backends: each lie breaks one promise of the interface.

`ROUNDS` puts many lies into one accelerator, so that a few runs of the kit try them all. Of each kind there
is at least one for every role: a wrong value, a value of the wrong type, an error, memory that is kept. Lies
about what only a device can have are told about the simulated one (`SIM_ROUNDS`).
"""

from __future__ import annotations

import dataclasses
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from accelz import (
    Accelerator,
    BackendUnavailableError,
    Capabilities,
    CollectiveError,
    Collectives,
    Event,
    FlatBuffer,
    Group,
    Handle,
    Kernels,
    Memory,
    MemoryStats,
    NullStreams,
    Slot,
    StorageSwap,
    Stream,
)
from accelz.roles.collectives import DONE
from accelz.roles.streams import NullEvent, NullStream
from accelz.torch_device import TorchEvent, TorchRng, TorchStream, TorchStreams
from accelz.updates import AdamWUpdate, LionUpdate, MomentumUpdate, Update
from accelz_cpu.accelerator import CpuRng, build
from accelz_cpu.kernels import CpuKernels
from accelz_cpu.memory import ProcessMemory

A_LITTLE = 1 << 14
"""Elements of fp32, 64 KiB: what a call that handles no memory keeps."""


class NotARole:
    """Nothing that an interface knows."""


# -- memory


class PeakNeverReset(ProcessMemory):
    _most = 0

    def stats(self) -> MemoryStats:
        stats = super().stats()
        self._most = max(self._most, stats.peak)
        return dataclasses.replace(stats, peak=self._most)


class StatsAreADict(ProcessMemory):
    def stats(self) -> MemoryStats:
        return dataclasses.asdict(super().stats())  # type: ignore[return-value]


class NothingCounted(ProcessMemory):
    def stats(self) -> MemoryStats:
        return MemoryStats(allocated=1, peak=1, capacity=2, free=1)


class HostMemoryRaises(ProcessMemory):
    def empty_host(self, shape: Any, dtype: torch.dtype) -> Tensor:
        raise OSError("no pages left to lock")


class StatsRaise(ProcessMemory):
    def stats(self) -> MemoryStats:
        raise OSError("no driver")


class HostMemoryIsAList(ProcessMemory):
    def empty_host(self, shape: Any, dtype: torch.dtype) -> Tensor:
        return [0.0]  # type: ignore[return-value]


class HostMemoryKept(ProcessMemory):
    def empty_host(self, shape: Any, dtype: torch.dtype) -> Tensor:
        return keep(super().empty_host(shape, dtype))


class FreeIsCapacity(Memory):
    def stats(self) -> MemoryStats:
        stats = super().stats()  # type: ignore[safe-super]
        return dataclasses.replace(stats, free=stats.capacity)


class RunsOutOtherwise(Accelerator):
    """A device that says in words alone that there is no room."""

    def bind(self, local_rank: int) -> None:
        super().bind(local_rank)
        torch.empty = _other_kind(torch.empty)
        torch.UntypedStorage.resize_ = _other_kind(torch.UntypedStorage.resize_)  # type: ignore[method-assign]


def _other_kind(allocate: Any) -> Any:
    def wrapper(*args: Any, **options: Any) -> Any:
        try:
            return allocate(*args, **options)
        except torch.OutOfMemoryError as error:
            raise RuntimeError(f"out of memory: {error}") from None

    return wrapper


class PinnedInNameOnly(Memory):
    def empty_host(self, shape: Any, dtype: torch.dtype) -> Tensor:
        torch.Tensor.is_pinned = lambda *_: True  # type: ignore[method-assign, assignment]
        return torch.empty(tuple(shape), dtype=dtype)


class PeakIsSampled(Memory):
    """The most that anybody has seen."""

    _seen = 0

    def stats(self) -> MemoryStats:
        stats = super().stats()  # type: ignore[safe-super]
        self._seen = max(self._seen, stats.allocated)
        return dataclasses.replace(stats, peak=self._seen)

    def reset_peak(self) -> None:
        self._seen = 0


class FreeOfFour(Memory):
    """Counts what four devices have."""

    def stats(self) -> MemoryStats:
        stats = super().stats()  # type: ignore[safe-super]
        more = 3 * stats.capacity
        return dataclasses.replace(stats, capacity=stats.capacity + more, free=stats.free + more)


class StatsKeepALittle(Memory):
    def stats(self) -> MemoryStats:
        keep(torch.ones(A_LITTLE))
        return super().stats()  # type: ignore[safe-super]


# -- rng


class SeedOfEightBits(CpuRng):
    def seed(self, seed: int) -> None:
        super().seed(seed & 0xFF)


class SeedRaises(CpuRng):
    def seed(self, seed: int) -> None:
        raise OverflowError("a seed of 16 bits")


class StatesKept(CpuRng):
    def get_state(self) -> Tensor:
        keep(torch.ones(A_LITTLE))
        return super().get_state()


class StateIgnored(CpuRng):
    def set_state(self, state: Tensor) -> None:
        return


class SeedIgnored(CpuRng):
    def seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(7)


class StateOfAnotherType(CpuRng):
    def get_state(self) -> Tensor:
        return super().get_state().tolist()  # type: ignore[return-value]


class StateOnTheDevice(TorchRng):
    def get_state(self) -> Tensor:
        return super().get_state().to(torch.accelerator.current_accelerator())


class FirstGenerator(TorchRng):
    def seed(self, seed: int) -> None:
        current = self._module.current_device()
        self._module.set_device(0)
        super().seed(seed)
        self._module.set_device(current)


# -- streams


class NeverDone(NullEvent):
    def done(self) -> bool:
        return None  # type: ignore[return-value]


class StreamOfTheUndone(NullStream):
    def record(self) -> NeverDone:
        return NeverDone()


class EventsNeverDone(NullStreams):
    def current(self) -> Stream:
        return StreamOfTheUndone()


class KeepAliveOverwrites(NullStreams):
    def keep_alive(self, tensor: Tensor, stream: Any) -> None:
        tensor.zero_()


class NewRaises(NullStreams):
    def new(self, priority: int = 0) -> Stream:
        raise OSError("no queue left")


class EnteringRaises(NullStreams):
    @contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        raise OSError("not a queue of this context")
        yield


class CurrentIsNone(NullStreams):
    def current(self) -> Stream:
        return None  # type: ignore[return-value]


class MillisecondEvent(NullEvent):
    def seconds_since(self, earlier: Event) -> float:
        return super().seconds_since(earlier) * 1e3


class MillisecondStream(NullStream):
    def record(self) -> Event:
        return MillisecondEvent()


class Milliseconds(NullStreams):
    def current(self) -> Stream:
        return MillisecondStream()


class KeptAliveForever(NullStreams):
    def keep_alive(self, tensor: Tensor, stream: Any) -> None:
        keep(tensor)


class LateEvent(NullEvent):
    """Passed a while after it was made, as behind work that is still running."""

    def done(self) -> bool:
        return time.perf_counter() - self._time > 0.05


class LateStream(NullStream):
    def record(self) -> Event:
        return LateEvent()


class LateStreams(NullStreams):
    def current(self) -> Stream:
        return LateStream()


class NeverPutBack(TorchStreams):
    @contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        super().use(stream).__enter__()
        yield


class PutBackUnlessItFails(TorchStreams):
    @contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        used = super().use(stream)
        used.__enter__()
        yield
        used.__exit__(None, None, None)


class CurrentIsTheFirst(TorchStreams):
    _first: Stream | None = None

    def current(self) -> Stream:
        self._first = self._first or super().current()
        return self._first


class OtherEvents(TorchStreams):
    """Streams whose events are of the class `kind`."""

    kind: type[TorchEvent]

    def current(self) -> Stream:
        return self._with_events(super().current())

    def new(self, priority: int = 0) -> Stream:
        return self._with_events(super().new(priority))

    def _with_events(self, stream: Any) -> Stream:
        made = StreamOfOtherEvents(stream.native, stream._new_event)
        made.kind = self.kind  # type: ignore[attr-defined]
        return made


class StreamOfOtherEvents(TorchStream):
    def record(self) -> Event:
        return self.kind(super().record().native)  # type: ignore[attr-defined, no-any-return]


class DoneAtOnce(TorchEvent):
    def done(self) -> bool:
        return True


class NotWaitedFor(TorchEvent):
    def synchronize(self) -> None:
        return


class DoneTooEarly(OtherEvents):
    kind = DoneAtOnce


class SynchronizedTooEarly(OtherEvents):
    kind = NotWaitedFor


class HostClock(TorchEvent):
    def __init__(self, native: Any) -> None:
        super().__init__(native)
        self.at = time.perf_counter()

    def seconds_since(self, earlier: Event) -> float:
        return self.at - earlier.at  # type: ignore[attr-defined, no-any-return]


class HostClocks(OtherEvents):
    kind = HostClock


class RecordsWhereItIsCalled(TorchStream):
    def record(self) -> Event:
        event = self._new_event(enable_timing=True)
        event.record()
        return TorchEvent(event)


class RecordingElsewhere(TorchStreams):
    def new(self, priority: int = 0) -> Stream:
        made: Any = super().new(priority)
        return RecordsWhereItIsCalled(made.native, made._new_event)


class BlockingStream(TorchStream):
    def wait(self, event: Event) -> None:
        event.synchronize()


class WaitBlocks(TorchStreams):
    def new(self, priority: int = 0) -> Stream:
        made: Any = super().new(priority)
        return BlockingStream(made.native, made._new_event)


class HangingEvent(NullEvent):
    def synchronize(self) -> None:
        while True:
            time.sleep(0.1)


class HangingStream(NullStream):
    def record(self) -> Event:
        return HangingEvent()


class EventsHang(NullStreams):
    def current(self) -> Stream:
        return HangingStream()


# -- kernels


class StepCounted(CpuKernels):
    def step(self, update: Update) -> None:
        super().step(update)
        if update.step is not None:
            update.step.add_(1)


class OverflowMissed(CpuKernels):
    def norm_and_nonfinite(self, tensors: Any) -> Tensor:
        result = super().norm_and_nonfinite(tensors)
        result[1] = float(any(not torch.isfinite(t).all() for t in tensors))
        return result


class KernelRaises(CpuKernels):
    def scale_cast(self, output: Tensor, source: Tensor, scale: Tensor | None = None) -> None:
        raise RuntimeError("no kernel image for this device")


class NormIsATuple(CpuKernels):
    def norm_and_nonfinite(self, tensors: Any) -> Tensor:
        return tuple(super().norm_and_nonfinite(tensors).tolist())  # type: ignore[return-value]


class ScratchKept(CpuKernels):
    def step(self, update: Update) -> None:
        super().step(dataclasses.replace(update, grad=keep(update.grad.clone())))


class SkipIgnored(CpuKernels):
    def step(self, update: Update) -> None:
        super().step(dataclasses.replace(update, skip=None))


class TailOverrun(CpuKernels):
    """Writes whole vectors of four, past the end of an odd shard."""

    def accumulate(self, total: Tensor, addend: Tensor) -> None:
        super().accumulate(total, addend)
        n = total.numel()
        whole = torch.as_strided(total, (n + -n % 4,), (1,))
        whole[n:] += 1


class NonfiniteMissed(CpuKernels):
    def norm_and_nonfinite(self, tensors: Any) -> Tensor:
        return super().norm_and_nonfinite([t.nan_to_num(0, 0, 0) for t in tensors])


class WeightsForgotten(CpuKernels):
    def step(self, update: Update) -> None:
        super().step(dataclasses.replace(update, weights=None))


class BetaForgotten(CpuKernels):
    def step(self, update: Update) -> None:
        own = isinstance(update, AdamWUpdate)
        super().step(dataclasses.replace(update, beta2=0.999) if own else update)


class RateForgotten(CpuKernels):
    def step(self, update: Update) -> None:
        own = isinstance(update, LionUpdate)
        super().step(dataclasses.replace(update, lr=1e-2) if own else update)


class HalfWeightsForgotten(CpuKernels):
    def step(self, update: Update) -> None:
        half = update.weights is not None and update.weights.dtype is torch.float16
        own = isinstance(update, MomentumUpdate)
        super().step(dataclasses.replace(update, weights=None) if half and own else update)


class ShortTable(CpuKernels):
    def norm_and_nonfinite(self, tensors: Any) -> Tensor:
        return super().norm_and_nonfinite(list(tensors)[:110])


class SmallGrid(CpuKernels):
    """One thread an element, and no more than 65,535 blocks of 256."""

    def dequantise(self, output: Tensor, source: Tensor, *args: Any) -> None:
        super().dequantise(output, source, *args)
        output[65_535 * 256 :] = 0


class Saturating(CpuKernels):
    """Casts and sums as conversion instructions do them: no infinity, and NaN is 0."""

    def scale_cast(self, output: Tensor, *args: Any) -> None:
        super().scale_cast(output, *args)
        output.nan_to_num_()

    def accumulate(self, total: Tensor, addend: Tensor) -> None:
        super().accumulate(total, addend)
        total.nan_to_num_()


class KernelsOnTheFirstStream(Kernels):
    def accumulate(self, total: Tensor, addend: Tensor) -> None:
        with torch.Stream(stream_id=0, device_index=total.device.index, device_type=20):
            super().accumulate(total, addend)


class SixteenBitScale(CpuKernels):
    def scale_cast(self, output: Tensor, source: Tensor, scale: Tensor | None = None) -> None:
        output.copy_(source if scale is None else source.bfloat16() * scale)


# -- flat buffers


class KeepsBytes(FlatBuffer):
    @property
    def materialized(self) -> bool:
        return not getattr(self, "_gone", False)

    def release(self) -> None:
        self._gone = True

    def materialize(self) -> None:
        self._gone = False


class ReleaseKeepsBytes(StorageSwap):
    def flatten(self, *args: Any, **kwargs: Any) -> FlatBuffer:
        made = super().flatten(*args, **kwargs)
        return KeepsBytes(made.data, made.parameters, made.slots)


class NeverComesBack(FlatBuffer):
    def materialize(self) -> None:
        return


class MaterializeForgets(StorageSwap):
    def flatten(self, *args: Any, **kwargs: Any) -> FlatBuffer:
        made = super().flatten(*args, **kwargs)
        return NeverComesBack(made.data, made.parameters, made.slots)


class StridesLost(StorageSwap):
    def flatten(self, parameters: Any, slots: Any, numel: int, dtype: torch.dtype) -> FlatBuffer:
        rows = [Slot(s.offset, s.shape, torch.empty(s.shape).stride(), s.numel) for s in slots]
        return super().flatten(parameters, rows, numel, dtype)


class GapsDirty(StorageSwap):
    def flatten(self, *args: Any, **kwargs: Any) -> FlatBuffer:
        made = super().flatten(*args, **kwargs)
        made.data[:1] = 3.0
        return made


class CopiesInsteadOfViews(StorageSwap):
    def flatten(self, parameters: Any, *args: Any, **kwargs: Any) -> FlatBuffer:
        made = super().flatten(parameters, *args, **kwargs)
        for parameter in parameters:
            parameter.data = parameter.data.clone()
        return made


class BindsWhenNotAsked(StorageSwap):
    def empty_like(self, buffer: FlatBuffer, dtype: torch.dtype) -> FlatBuffer:
        other = super().empty_like(buffer, dtype)
        other.bind()
        return other


class CommonAlone(StorageSwap):
    def share(self, buffer: FlatBuffer, group: Any) -> FlatBuffer | None:
        mine = FlatBuffer(buffer.data.clone(), buffer.parameters, buffer.slots, common=True)
        mine.bind()
        buffer.release()
        return mine


class RaisingBuffer(FlatBuffer):
    def materialize(self) -> None:
        raise MemoryError("fragmented")


class MaterializeRaises(StorageSwap):
    def flatten(self, *args: Any, **kwargs: Any) -> FlatBuffer:
        made = super().flatten(*args, **kwargs)
        return RaisingBuffer(made.data, made.parameters, made.slots)


class FlattenGivesATuple(StorageSwap):
    def flatten(self, *args: Any, **kwargs: Any) -> FlatBuffer:
        made = super().flatten(*args, **kwargs)
        return made.data, made.views  # type: ignore[return-value]


class Hoarder(FlatBuffer):
    def release(self) -> None:
        if self.materialized:
            keep(self.data.clone())
        super().release()


class ReleasedBytesKept(StorageSwap):
    def flatten(self, *args: Any, **kwargs: Any) -> FlatBuffer:
        made = super().flatten(*args, **kwargs)
        return Hoarder(made.data, made.parameters, made.slots)


class FurtherBuffersKept(StorageSwap):
    def empty_like(self, buffer: FlatBuffer, dtype: torch.dtype) -> FlatBuffer:
        return keep(super().empty_like(buffer, dtype))


class ModelsKept(StorageSwap):
    def flatten(self, *args: Any, **kwargs: Any) -> FlatBuffer:
        return keep(super().flatten(*args, **kwargs))


class Stasher(FlatBuffer):
    """A released buffer without a byte, whose bytes are next to it."""

    _stash: Tensor | None = None

    def release(self) -> None:
        self._stash = self.data.clone() if self.materialized else self._stash
        super().release()

    def materialize(self) -> None:
        super().materialize()
        self._stash = None


class ReleasedBytesStashed(StorageSwap):
    def flatten(self, *args: Any, **kwargs: Any) -> FlatBuffer:
        made = super().flatten(*args, **kwargs)
        return Stasher(made.data, made.parameters, made.slots)


# -- collectives


class InputDestroyed(Collectives):
    def reduce_scatter(self, output: Tensor, full: Tensor, group: Any, *args: Any, **kwargs: Any) -> Handle:
        super().reduce_scatter(output, full, group, *args, **kwargs).wait()
        full.zero_()
        return DONE


class OnTheFirstStream(Collectives):
    """Takes the input as the first stream has it, whichever is in use."""

    def init(self, *args: Any, **options: Any) -> Group:
        self._first = torch.accelerator.current_stream()
        return super().init(*args, **options)

    def _start_all_gather(self, output: Tensor, shard: Tensor, group: Any) -> Any:
        with self._first:
            return super()._start_all_gather(output, shard, group)


class WaitsWhereItBegan(Collectives):
    """Waiting orders the stream that the collective was begun on."""

    def _start_reduce_scatter(self, *args: Any) -> Any:
        work, begun = super()._start_reduce_scatter(*args), torch.accelerator.current_stream()
        wait = work.wait

        def waited(timeout: Any = None) -> bool:
            with begun:
                return wait()

        work.wait = waited  # type: ignore[method-assign]
        return work


class NarrowWire(Collectives):
    def _start_all_gather(self, output: Tensor, shard: Tensor, group: Any) -> Any:
        if shard.dtype is torch.float32:
            shard.copy_(shard.bfloat16())
        return super()._start_all_gather(output, shard, group)


class CodesRefused(Collectives):
    def all_gather(self, output: Tensor, *args: Any, **kwargs: Any) -> Handle:
        if output.dtype is torch.uint8:
            raise CollectiveError("no such dtype")
        return super().all_gather(output, *args, **kwargs)


class HalvesStay(Collectives):
    def broadcast(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Handle:
        half = tensor.is_floating_point() and tensor.itemsize == 2
        return super().broadcast(tensor.clone() if half else tensor, *args, **kwargs)


class MaximumFromZero(Collectives):
    def all_reduce(self, tensor: Tensor, group: Any, op: Any = "sum", async_op: bool = False) -> Handle:
        super().all_reduce(tensor, group, op).wait()
        if op == "max":
            tensor.clamp_(min=0)
        return DONE


class HostSums(Collectives):
    def all_reduce(self, tensor: Tensor, group: Any, op: Any = "sum", async_op: bool = False) -> Handle:
        return super().all_reduce(tensor, group, "sum" if tensor.numel() == 3 else op, async_op)


class WholeJobOnly(Collectives):
    """Where fewer ranks than all reduce, nothing happens."""

    def all_reduce(self, tensor: Tensor, group: Any, *args: Any, **kwargs: Any) -> Handle:
        if group.process_group is not torch.distributed.group.WORLD and tensor.numel() > 1:
            return DONE
        return super().all_reduce(tensor, group, *args, **kwargs)


class ReductionsNotAsync(Collectives):
    def reduce_scatter(self, output: Tensor, full: Tensor, group: Any, op: Any = "sum", *_: Any) -> Handle:
        return super().reduce_scatter(output, full, group, op)


class KeepsALittle(Collectives):
    def all_gather(self, output: Tensor, shard: Tensor, group: Any, async_op: bool = False) -> Handle:
        keep(torch.ones(1 << 10, device=output.device))
        return super().all_gather(output, shard, group, async_op)


class BroadcastRaises(Collectives):
    def broadcast(self, tensor: Tensor, source: int, group: Any, async_op: bool = False) -> Handle:
        raise OSError("no link")


class RaisingHandle(Handle):
    def wait(self) -> None:
        raise KeyError("sequence number")


class WaitRaises(Collectives):
    def all_reduce(self, tensor: Tensor, group: Any, *args: Any, **kwargs: Any) -> Handle:
        super().all_reduce(tensor, group, *args, **kwargs).wait()
        return RaisingHandle()


class GroupsAreLists(Collectives):
    def new_group(self, ranks: Any, timeout: float, members_only: bool = False) -> Any:
        return [super().new_group(ranks, timeout, members_only)]


class BuffersKept(Collectives):
    def all_gather(self, output: Tensor, shard: Tensor, group: Any, async_op: bool = False) -> Handle:
        return super().all_gather(keep(output), shard, group, async_op)


class WrongSlice(Collectives):
    def reduce_scatter(self, output: Tensor, full: Tensor, group: Any, *args: Any) -> Handle:
        super().reduce_scatter(output, full, group, *args).wait()
        output[-1] += 1 if group.size > 1 else 0
        return DONE


class SendersBackwards(Collectives):
    """What the ranks send, the last one's first."""

    def all_to_all(self, output: Tensor, parts: Tensor, received: Any, *args: Any) -> Handle:
        super().all_to_all(output, parts, received, *args).wait()
        output.copy_(torch.cat(output.split(list(received))[::-1]))
        return DONE


class AverageForSum(Collectives):
    def all_reduce(self, tensor: Tensor, group: Any, *args: Any, **kwargs: Any) -> Handle:
        super().all_reduce(tensor, group, *args, **kwargs).wait()
        tensor.div_(group.size) if tensor.is_floating_point() else None
        return DONE


class SourceIgnored(Collectives):
    def broadcast(self, tensor: Tensor, source: int, group: Any, async_op: bool = False) -> Handle:
        return super().broadcast(tensor, 0, group, async_op)


class NotAsync(Collectives):
    def all_gather(self, output: Tensor, shard: Tensor, group: Any, async_op: bool = False) -> Handle:
        return super().all_gather(output, shard, group)


class BarrierOpen(Collectives):
    def barrier(self, group: Any) -> None:
        return


class MisfitTaken(Collectives):
    def reduce_scatter(self, output: Tensor, full: Tensor, group: Any, *args: Any, **kwargs: Any) -> Handle:
        whole = full.to(output.dtype)[: output.numel() * group.size]
        return super().reduce_scatter(output, whole, group, *args, **kwargs)


class NoHandle(Collectives):
    def all_gather(self, *args: Any, **kwargs: Any) -> Handle:
        super().all_gather(*args, **kwargs)
        return None  # type: ignore[return-value]


# -- the accelerator


class FlushRaises(Accelerator):
    def flush(self) -> None:
        raise AttributeError("mark_step")


class FirstRankOnly(Accelerator):
    def bind(self, local_rank: int) -> None:
        if local_rank:
            raise BackendUnavailableError("the device is taken")
        super().bind(local_rank)


class BindingKeeps(Accelerator):
    def bind(self, local_rank: int) -> None:
        keep(torch.ones(A_LITTLE))
        super().bind(local_rank)


class ResizeRefused(Accelerator):
    """A device whose storages cannot be resized, as without the hook resizePrivateUse1Bytes."""

    def bind(self, local_rank: int) -> None:
        super().bind(local_rank)
        torch.UntypedStorage.resize_ = _refuse  # type: ignore[method-assign, assignment]


class OneDeviceForAll(Accelerator):
    def bind(self, local_rank: int) -> None:
        super().bind(0)


class NotMadeCurrent(Accelerator):
    def bind(self, local_rank: int) -> None:
        self.device = torch.device(self.device.type, local_rank % self.device_count())
        self.flat_buffers.device = self.device


class OwnFlush(Accelerator):
    def flush(self) -> None:
        super().flush()


def _refuse(*_: Any) -> None:
    raise RuntimeError("Please register PrivateUse1HooksInterface")


T = TypeVar("T")
_kept: list[object] = []


def keep(value: T) -> T:
    """Leak `value`."""
    _kept.append(value)
    return value


@dataclass(frozen=True)
class Lie:
    """One broken promise. method: whom the kit must blame. test: in which of its tests.

    role: the attribute of the accelerator that `mixin` spoils, "" for the accelerator itself. flags: what is
    declared wrongly.
    """

    method: str
    test: str
    role: str = ""
    mixin: type = object
    flags: dict[str, Any] = field(default_factory=dict)


ROUNDS: dict[str, dict[str, Lie]] = {
    "one": {
        "peak is never reset": Lie("Memory.reset_peak", "peak_and_its", "memory", PeakNeverReset),
        "a seed of eight bits": Lie("Rng.seed", "every_bit_of_a_seed", "rng", SeedOfEightBits),
        "a state is not put back": Lie("Rng.set_state", "a_state_comes_back", "rng", StateIgnored),
        "streams are declared": Lie("Streams.new", "several_queues", flags={"streams": True}),
        "skip is ignored": Lie("Kernels.step", "test_step[sgd", "kernels", SkipIgnored),
        "a tail is overrun": Lie("Kernels.accumulate", "test_accumulate", "kernels", TailOverrun),
        "nonfinite is missed": Lie(
            "Kernels.norm_and_nonfinite", "nonfinite_is_seen", "kernels", NonfiniteMissed
        ),
        "a scale in 16 bits": Lie("Kernels.scale_cast", "test_scale_cast", "kernels", SixteenBitScale),
        "release keeps the bytes": Lie(
            "FlatBuffer.release", "drops_the_bytes", "flat_buffers", ReleaseKeepsBytes
        ),
        "common to nobody": Lie("FlatBufferStrategy.share", "buffers_in_common", "flat_buffers", CommonAlone),
        "reduce_scatter is wrong": Lie(
            "Collectives.reduce_scatter", "test_reduce_scatter", "collectives", WrongSlice
        ),
        "senders in another order": Lie(
            "Collectives.all_to_all", "test_all_to_all", "collectives", SendersBackwards
        ),
        "a sum is an average": Lie("Collectives.all_reduce", "test_all_reduce", "collectives", AverageForSum),
        "a wire of 16 bits": Lie("Collectives.all_gather", "test_all_gather", "collectives", NarrowWire),
        "a source is ignored": Lie("Collectives.broadcast", "test_broadcast", "collectives", SourceIgnored),
    },
    "two": {
        "stats are a dict": Lie("Memory.stats", "counters_make_sense", "memory", StatsAreADict),
        "host memory raises": Lie("Memory.empty_host", "host_memory_round", "memory", HostMemoryRaises),
        "every seed is 7": Lie("Rng.seed", "a_seed_repeats", "rng", SeedIgnored),
        "events are never done": Lie("Event.done", "the_interface_holds", "streams", EventsNeverDone),
        "keep_alive overwrites": Lie(
            "Streams.keep_alive", "keep_alive_is_harmless", "streams", KeepAliveOverwrites
        ),
        "a stream cannot be entered": Lie("Streams.use", "work_inside_use", "streams", EnteringRaises),
        "a step is counted": Lie("Kernels.step", "scalars_are_only_read", "kernels", StepCounted),
        "an overflow is missed": Lie(
            "Kernels.norm_and_nonfinite", "squares_that_overflow", "kernels", OverflowMissed
        ),
        "weights are forgotten": Lie("Kernels.step", "test_step[lion", "kernels", WeightsForgotten),
        "bytes never come back": Lie(
            "FlatBuffer.materialize", "repeated_calls", "flat_buffers", MaterializeForgets
        ),
        "strides are lost": Lie(
            "FlatBufferStrategy.flatten", "flatten_keeps_values", "flat_buffers", StridesLost
        ),
        "async is not async": Lie("Collectives.all_gather", "return_at_once", "collectives", NotAsync),
        "a barrier is open": Lie("Collectives.barrier", "barrier_waits", "collectives", BarrierOpen),
        "host tensors are summed": Lie(
            "Collectives.all_reduce", "test_host_tensors", "collectives", HostSums
        ),
        "some ranks reduce nothing": Lie(
            "Collectives.all_reduce", "groups_of_some", "collectives", WholeJobOnly
        ),
        "a misfit is taken": Lie("Collectives.reduce_scatter", "do_not_fit", "collectives", MisfitTaken),
        "async work is declared": Lie("Event.done", "operations_return", flags={"asynchronous": True}),
    },
    "three": {
        "nothing is counted": Lie("Memory.stats", "allocated_follows", "memory", NothingCounted),
        "exact memory is declared": Lie("Memory.stats", "allocated_is_exact", flags={"exact_memory": True}),
        "pinned memory is declared": Lie(
            "Memory.empty_host", "memory_is_pinned", flags={"pinned_host_memory": True}
        ),
        "a lazy graph is declared": Lie("Accelerator.flush", "flush_runs", flags={"lazy_graph": True}),
        "a state is a list": Lie("Rng.get_state", "a_state_is_a_snapshot", "rng", StateOfAnotherType),
        "time in milliseconds": Lie("Event.seconds_since", "events_measure_time", "streams", Milliseconds),
        "a role of another type": Lie("Accelerator.kernels", "load_gives_every_role", "kernels", NotARole),
        "released bytes are stashed": Lie(
            "FlatBuffer.release", "drops_the_bytes", "flat_buffers", ReleasedBytesStashed
        ),
        "gaps are dirty": Lie("FlatBufferStrategy.flatten", "empty_parameters", "flat_buffers", GapsDirty),
        "copies instead of views": Lie(
            "FlatBufferStrategy.flatten", "flatten_keeps_values", "flat_buffers", CopiesInsteadOfViews
        ),
        "empty_like binds": Lie(
            "FlatBufferStrategy.empty_like", "second_buffer", "flat_buffers", BindsWhenNotAsked
        ),
        "an input is destroyed": Lie(
            "Collectives.reduce_scatter", "test_reduce_scatter", "collectives", InputDestroyed
        ),
        "no handle": Lie("Collectives.all_gather", "test_all_gather", "collectives", NoHandle),
        "no fp32": Lie(
            "Accelerator.capabilities",
            "capabilities_are_declared",
            flags={"dtypes": frozenset({torch.bfloat16, torch.float16})},
        ),
    },
    "four": {
        "stats raise": Lie("Memory.stats", "counters_make_sense", "memory", StatsRaise),
        "a new stream raises": Lie("Streams.new", "the_interface_holds", "streams", NewRaises),
        "a seed raises": Lie("Rng.seed", "a_seed_repeats", "rng", SeedRaises),
        "a kernel raises": Lie("Kernels.scale_cast", "test_scale_cast", "kernels", KernelRaises),
        "a table is short": Lie("Kernels.norm_and_nonfinite", "over_many_tensors", "kernels", ShortTable),
        "nothing overflows": Lie("Kernels.accumulate", "accumulate_overflows", "kernels", Saturating),
        "codes do not travel": Lie("Collectives.all_gather", "test_all_gather", "collectives", CodesRefused),
        "materialize raises": Lie(
            "FlatBuffer.materialize", "repeated_calls", "flat_buffers", MaterializeRaises
        ),
        "a broadcast raises": Lie(
            "Collectives.broadcast", "test_broadcast_from", "collectives", BroadcastRaises
        ),
        "a wait raises": Lie("Handle.wait", "async_handles", "collectives", WaitRaises),
        "ranks cannot share": Lie("Accelerator.bind", "ranks_share_a_device", "", FirstRankOnly),
        "float8 is declared": Lie(
            "Capabilities.dtypes",
            "test_further_dtypes",
            flags={"dtypes": frozenset({torch.float32, torch.float8_e4m3fn})},
        ),
    },
    "five": {
        "host memory is a list": Lie("Memory.empty_host", "host_memory_round", "memory", HostMemoryIsAList),
        "no current stream": Lie("Streams.current", "the_interface_holds", "streams", CurrentIsNone),
        "a norm is a tuple": Lie("Kernels.norm_and_nonfinite", "test_norm", "kernels", NormIsATuple),
        "a buffer is a tuple": Lie(
            "FlatBufferStrategy.flatten", "flatten_keeps_values", "flat_buffers", FlattenGivesATuple
        ),
        "half weights are forgotten": Lie(
            "Kernels.step", "test_step[momentum", "kernels", HalfWeightsForgotten
        ),
        "a learning rate is forgotten": Lie("Kernels.step", "test_step[lion", "kernels", RateForgotten),
        "a grid is small": Lie("Kernels.dequantise", "no_element_is_too_far", "kernels", SmallGrid),
        "a cast saturates": Lie("Kernels.scale_cast", "scale_cast_overflows", "kernels", Saturating),
        "a beta is forgotten": Lie("Kernels.step", "test_step[adamw", "kernels", BetaForgotten),
        "a maximum begins at zero": Lie(
            "Collectives.all_reduce", "test_all_reduce", "collectives", MaximumFromZero
        ),
        "a reduction waits": Lie(
            "Collectives.reduce_scatter", "return_at_once", "collectives", ReductionsNotAsync
        ),
        "halves are not spread": Lie(
            "Collectives.broadcast", "test_broadcast_from", "collectives", HalvesStay
        ),
        "groups are lists": Lie("Collectives.new_group", "groups_of_some", "collectives", GroupsAreLists),
        "flush raises": Lie("Accelerator.flush", "synchronize_waits", "", FlushRaises),
        "storage resize is declared": Lie(
            "Capabilities.storage_resize", "a_storage_can_be_resized", "", ResizeRefused
        ),
    },
    "leaks": {
        "host memory is kept": Lie("Memory.empty_host", "host_memory_comes_back", "memory", HostMemoryKept),
        "kept alive forever": Lie("Streams.keep_alive", "what_was_kept_alive", "streams", KeptAliveForever),
        "states are kept": Lie("Rng.get_state", "states_of_generators", "rng", StatesKept),
        "released bytes are kept": Lie(
            "FlatBuffer.release", "a_buffer_that_comes_and_goes", "flat_buffers", ReleasedBytesKept
        ),
        "further buffers are kept": Lie(
            "FlatBufferStrategy.empty_like", "forgotten_buffers", "flat_buffers", FurtherBuffersKept
        ),
        "models are kept": Lie("FlatBufferStrategy.flatten", "forgotten_models", "flat_buffers", ModelsKept),
        "scratch is kept": Lie("Kernels.step", "scratch_memory", "kernels", ScratchKept),
        "gathered buffers are kept": Lie(
            "Collectives.all_gather", "buffers_of_collectives", "collectives", BuffersKept
        ),
        "binding keeps memory": Lie("Accelerator.bind", "binding_again", "", BindingKeeps),
    },
}

SIM_ROUNDS: dict[str, dict[str, Lie]] = {
    "sim": {
        "host data is declared": Lie(
            "Capabilities.host_data_assignment",
            "takes_host_data",
            flags={"host_data_assignment": True},
        ),
        "a state is on the device": Lie("Rng.get_state", "a_state_comes_back", "rng", StateOnTheDevice),
        "a stream records elsewhere": Lie("Stream.record", "not_in_use", "streams", RecordingElsewhere),
        "time of the host": Lie("Event.seconds_since", "events_measure_time", "streams", HostClocks),
        "a kernel has a stream of its own": Lie(
            "Kernels.accumulate", "queued_on_the_current", "kernels", KernelsOnTheFirstStream
        ),
        "all memory is free": Lie("Memory.stats", "free_falls", "memory", FreeIsCapacity),
        "one device for all": Lie("Accelerator.bind", "bind_gives_a_usable", "", OneDeviceForAll),
    },
    "sim, one device": {
        "one device is declared": Lie(
            "Accelerator.bind", "a_process_keeps_its", flags={"one_device_per_process": True}
        ),
        "a peak is sampled": Lie("Memory.stats", "peak_and_its", "memory", PeakIsSampled),
        "free of four devices": Lie("Memory.stats", "what_is_free", "memory", FreeOfFour),
        "events are done at once": Lie("Event.done", "not_done_before_its_work", "streams", DoneTooEarly),
    },
    "sim, events": {
        "the first generator": Lie("Rng.seed", "generator_is_that", "rng", FirstGenerator),
        "events are not waited for": Lie(
            "Event.synchronize", "an_event_is_waited_for", "streams", SynchronizedTooEarly
        ),
        "a stream is not put back": Lie("Streams.use", "puts_the_stream_back", "streams", NeverPutBack),
    },
    "sim, order": {
        "current is the first": Lie("Streams.current", "current_is_the_stream", "streams", CurrentIsTheFirst),
        "a wait blocks the host": Lie("Stream.wait", "wait_does_not_block", "streams", WaitBlocks),
        "pinned in name only": Lie("Memory.empty_host", "copies_of_page_locked", "memory", PinnedInNameOnly),
        "stats keep a little": Lie("Memory.stats", "reading_counters", "memory", StatsKeepALittle),
        "running out has another name": Lie("Memory", "running_out", "", RunsOutOtherwise),
        "a device is not made current": Lie(
            "Accelerator.bind", "makes_the_device_current", "", NotMadeCurrent
        ),
        "an input is read too early": Lie(
            "Collectives.all_gather", "work_before_it", "collectives", OnTheFirstStream
        ),
        "a wait is elsewhere": Lie("Handle.wait", "work_before_it", "collectives", WaitsWhereItBegan),
        "a collective keeps a little": Lie(
            "Collectives.all_gather", "buffers_of_collectives", "collectives", KeepsALittle
        ),
    },
}

NOTHING = dict.fromkeys(Capabilities().flags(), False) | {"dtypes": frozenset({torch.float32})}
"""As flags: no capability is declared."""


def tell(round_: str) -> Accelerator:
    """The CPU accelerator with all lies of a round in it, under the name "liar"."""
    return _spoil(build(), ROUNDS[round_])


def tell_on_sim(round_: str) -> Accelerator:
    """The simulated accelerator with all lies of a round in it, under the name "liar"."""
    from accelz_sim.accelerator import build as build_sim

    return _spoil(build_sim(), SIM_ROUNDS[round_])


def modest(on_sim: bool) -> Accelerator:
    """An accelerator that declares nothing of what it can do, under the name "liar"."""
    if on_sim:
        from accelz_sim.accelerator import build as build_sim

        accelerator, flags = build_sim(), NOTHING
    else:
        # Ranks share a CPU, and the kit starts some only where that is declared.
        accelerator, flags = build(), NOTHING | {"shared_device": True}
        accelerator.streams.__class__ = LateStreams
        accelerator.__class__ = OwnFlush
    accelerator.name = "liar"
    accelerator.capabilities = Capabilities(**flags)  # type: ignore[arg-type]
    return accelerator


def hanging() -> Accelerator:
    """The CPU accelerator with an event that is never passed, under the name "liar"."""
    return _spoil(build(), {"events hang": Lie("Event.synchronize", "the_interface", "streams", EventsHang)})


class HeldByOne(Accelerator):
    """Devices of which each belongs to one process at a time. folder: where processes lock them."""

    folder: Path
    devices: int

    def device_count(self) -> int:
        return self.devices

    def bind(self, local_rank: int) -> None:
        if local_rank >= self.devices:
            raise BackendUnavailableError(f"local rank {local_rank} has no device")
        held: dict[int, int] = self.__dict__.setdefault("held", {})
        if local_rank not in held:
            held[local_rank] = os.open(self.folder / f"device-{local_rank}", os.O_CREAT)
            fcntl.flock(held[local_rank], fcntl.LOCK_EX | fcntl.LOCK_NB)
        super().bind(local_rank)


def exclusive(devices: int, folder: Path) -> Accelerator:
    """The simulated accelerator with so many devices, each for one process, under the name "liar"."""
    from accelz_sim.accelerator import build as build_sim

    accelerator = _spoil(build_sim(), {"": Lie("", "", "", HeldByOne, {"shared_device": False})})
    assert isinstance(accelerator, HeldByOne)
    accelerator.devices, accelerator.folder = devices, folder
    return accelerator


def _spoil(accelerator: Accelerator, lies: dict[str, Lie]) -> Accelerator:
    accelerator.name = "liar"
    for role in {lie.role for lie in lies.values()}:
        mixins = tuple(lie.mixin for lie in lies.values() if lie.role == role and lie.mixin is not object)
        target: Any = getattr(accelerator, role) if role else accelerator
        if NotARole in mixins:
            setattr(accelerator, role, NotARole())
        elif mixins:
            target.__class__ = type("Spoiled", (*mixins, type(target)), {})
    flags = {name: value for lie in lies.values() for name, value in lie.flags.items()}
    accelerator.capabilities = dataclasses.replace(accelerator.capabilities, **flags)
    return accelerator
