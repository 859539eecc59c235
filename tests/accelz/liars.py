"""Broken doubles of the CPU backend: each lie breaks one promise of the interface.

`ROUNDS` puts many lies into one accelerator, so that a few runs of the kit try them all.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from accelz.accelerator import Accelerator
from accelz.collectives import DONE, Collectives, Handle
from accelz.flat_buffer import FlatBuffer, Slot, StorageSwap
from accelz.memory import MemoryStats
from accelz.streams import NullEvent, NullStream, NullStreams
from accelz_cpu.accelerator import CpuKernels, CpuRng, build
from accelz_cpu.memory import ProcessMemory

CPU = torch.device("cpu")


class NotARole:
    """Nothing that an interface knows."""


# -- memory


class PeakNeverReset(ProcessMemory):
    def __init__(self) -> None:
        super().__init__()
        self._most = 0

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


# -- rng


class StateIgnored(CpuRng):
    def set_state(self, state: Tensor) -> None:
        return


class SeedIgnored(CpuRng):
    def seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(7)


class StateOfAnotherType(CpuRng):
    def get_state(self) -> Tensor:
        return super().get_state().tolist()  # type: ignore[return-value]


# -- streams


class NeverDone(NullEvent):
    def done(self) -> bool:
        return None  # type: ignore[return-value]


class StreamOfTheUndone(NullStream):
    def record(self) -> NeverDone:
        return NeverDone()


class EventsNeverDone(NullStreams):
    def __init__(self) -> None:
        super().__init__()
        self._only = StreamOfTheUndone()


class KeepAliveOverwrites(NullStreams):
    def keep_alive(self, tensor: Tensor, stream: Any) -> None:
        tensor.zero_()


# -- kernels


class SkipIgnored(CpuKernels):
    def adamw(self, *args: Any, **kwargs: Any) -> None:
        super().adamw(*args, **{**kwargs, "skip": None})


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
    def adamw(self, *args: Any, **kwargs: Any) -> None:
        super().adamw(*args, **{**kwargs, "weights": None})


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


# -- collectives


class WrongSlice(Collectives):
    def reduce_scatter(self, output: Tensor, full: Tensor, group: Any, *args: Any) -> Handle:
        super().reduce_scatter(output, full, group, *args).wait()
        output[-1] += 1 if group.size > 1 else 0
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
    def reduce_scatter(self, output: Tensor, full: Tensor, group: Any, *args: Any) -> Handle:
        whole = full.to(output.dtype)[: output.numel() * group.size]
        return super().reduce_scatter(output, whole, group, *args)


class NoHandle(Collectives):
    def all_gather(self, *args: Any, **kwargs: Any) -> Handle:
        super().all_gather(*args, **kwargs)
        return None  # type: ignore[return-value]


@dataclass(frozen=True)
class Lie:
    """One broken promise. method: whom the kit must blame. test: in which of its tests.

    role: the attribute of the accelerator that `mixin` spoils; "" where `flags` are declared wrongly.
    """

    method: str
    test: str
    role: str = ""
    mixin: type = object
    flags: dict[str, Any] = field(default_factory=dict)


ROUNDS: dict[str, dict[str, Lie]] = {
    "one": {
        "peak is never reset": Lie("Memory.reset_peak", "peak_and_its", "memory", PeakNeverReset),
        "a state is not put back": Lie("Rng.set_state", "a_state_comes_back", "rng", StateIgnored),
        "streams are declared": Lie("Streams.new", "several_queues", flags={"streams": True}),
        "skip is ignored": Lie("Kernels.adamw", "test_adamw", "kernels", SkipIgnored),
        "a tail is overrun": Lie("Kernels.accumulate", "test_accumulate", "kernels", TailOverrun),
        "nonfinite is missed": Lie(
            "Kernels.norm_and_nonfinite", "nonfinite_is_seen", "kernels", NonfiniteMissed
        ),
        "a scale in 16 bits": Lie("Kernels.scale_cast", "test_scale_cast", "kernels", SixteenBitScale),
        "release keeps the bytes": Lie(
            "FlatBuffer.release", "drops_the_bytes", "flat_buffers", ReleaseKeepsBytes
        ),
        "reduce_scatter is wrong": Lie(
            "Collectives.reduce_scatter", "test_reduce_scatter", "collectives", WrongSlice
        ),
        "a sum is an average": Lie("Collectives.all_reduce", "test_all_reduce", "collectives", AverageForSum),
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
        "weights are forgotten": Lie("Kernels.adamw", "test_adamw", "kernels", WeightsForgotten),
        "bytes never come back": Lie(
            "FlatBuffer.materialize", "repeated_calls", "flat_buffers", MaterializeForgets
        ),
        "strides are lost": Lie(
            "FlatBufferStrategy.flatten", "flatten_keeps_values", "flat_buffers", StridesLost
        ),
        "async is not async": Lie("Collectives.all_gather", "return_at_once", "collectives", NotAsync),
        "a barrier is open": Lie("Collectives.barrier", "barrier_waits", "collectives", BarrierOpen),
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
        "a role of another type": Lie("Accelerator.kernels", "load_gives_every_role", "kernels", NotARole),
        "gaps are dirty": Lie("FlatBufferStrategy.flatten", "empty_parameters", "flat_buffers", GapsDirty),
        "copies instead of views": Lie(
            "FlatBufferStrategy.flatten", "flatten_keeps_values", "flat_buffers", CopiesInsteadOfViews
        ),
        "empty_like binds": Lie(
            "FlatBufferStrategy.empty_like", "second_buffer", "flat_buffers", BindsWhenNotAsked
        ),
        "no handle": Lie("Collectives.all_gather", "test_all_gather", "collectives", NoHandle),
        "no fp32": Lie(
            "Accelerator.capabilities",
            "capabilities_are_declared",
            flags={"dtypes": frozenset({torch.bfloat16, torch.float16})},
        ),
    },
}

UNDECLARED = {"storage_resize": False, "dtypes": frozenset({torch.float32})}


def tell(round_: str) -> Accelerator:
    """The CPU accelerator with all lies of a round in it, under the name "liar"."""
    accelerator = build()
    accelerator.name = "liar"
    lies = ROUNDS.get(round_, {}).values()
    for role in {lie.role for lie in lies if lie.role}:
        mixins = [lie.mixin for lie in lies if lie.role == role]
        setattr(accelerator, role, _spoiled(getattr(accelerator, role), mixins))
    flags = {name: value for lie in lies for name, value in lie.flags.items()} if lies else UNDECLARED
    accelerator.capabilities = dataclasses.replace(accelerator.capabilities, **flags)
    return accelerator


def _spoiled(role: Any, mixins: list[type]) -> Any:
    if NotARole in mixins:
        return NotARole()
    kind = type("Spoiled", (*mixins, type(role)), {})
    return kind(CPU) if isinstance(role, StorageSwap) else kind()
