"""Lies of the memory role."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from accelz import (
    Accelerator,
    Memory,
    MemoryStats,
)
from accelz_cpu.memory import ProcessMemory

from .kept import A_LITTLE, keep


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
