"""Make room for state in its tier."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

import accelz
from accelz import HOST, Accelerator, Kernels
from zero.config.offload import Tier
from zero.tiers.carrier import Carrier
from zero.tiers.pipeline import Pipeline
from zero.tiers.placement import Placement
from zero.tiers.read_ahead import ReadAhead
from zero.tiers.record import DiskFormat, Record, section_bytes
from zero.tiers.split_master import SplitMaster
from zero.tiers.swap_file import Section, SwapFile
from zero.tiers.values import Values
from zero.tiers.weight_writer import WeightWriter


class Movable(Protocol):
    """State that may leave the device."""

    def relieve(self, nbytes: int) -> int:
        """Move state to the host until about `nbytes` are free, if possible; return the bytes moved."""


class Stores:
    """Makes and finds the stores of each tier; one for each engine.

    If the device is the host, the host tier is the device's memory, and nothing is there twice.

    folder: for state on disk. compact: of masters on disk, keep only what bf16 weights lack. streamed:
    records on the host are page-locked, to be stepped on the device.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        folder: Path | None,
        compact: bool,
        streamed: bool,
    ) -> None:
        self.accelerator = accelerator
        self.pipeline = Pipeline(accelerator.memory)
        self._folder = folder
        self._compact = compact
        self._streamed = streamed
        self._movable: list[weakref.ref[Movable]] = []  # which hold these stores

    @cached_property
    def carrier(self) -> Carrier:
        """The carrier, made when something moves for the first time, as it takes a stream."""
        return Carrier(self.accelerator)

    @cached_property
    def read_ahead(self) -> ReadAhead:
        """Reads parameters on disk before their gathers."""
        return ReadAhead(self.accelerator)

    @cached_property
    def swap_file(self) -> SwapFile:
        assert self._folder is not None
        return SwapFile(self._folder)

    def kernels(self, device: torch.device) -> Kernels:
        """Return the kernels for tensors on `device`: the accelerator's, or the host's."""
        return self.accelerator.kernels if device == self.accelerator.device else self._host_kernels

    def may_move(self, state: Movable) -> None:
        """Have `relieve` move this state too, after what it has been given before."""
        self._movable.append(weakref.ref(state))

    def relieve(self, nbytes: int) -> int:
        """Free about that many bytes of the device, if possible; return how many."""
        freed = 0
        for state in filter(None, (found() for found in self._movable)):
            freed += state.relieve(nbytes - freed) if freed < nbytes else 0
        return freed

    def resolve(self, tier: Tier) -> Tier:
        """Return the tier that `tier` amounts to on this device."""
        return "device" if tier == "host" and self.accelerator.device.type == HOST.type else tier

    def keep(self, values: Tensor, tier: Tier) -> Values:
        """Return the values in `tier`: a copy, or for the device the values themselves."""
        if tier == "host":
            return self.accelerator.memory.empty_host(tuple(values.shape), values.dtype).copy_(values)
        if tier == "disk":
            stored = self.on_disk(values.numel(), values.dtype)
            stored.write(values)
            return stored
        return values

    def disk_bytes(self, numel: int, dtype: torch.dtype, placement: Placement, gradient: torch.dtype) -> int:
        """Return the disk bytes of a group of `numel` elements in `dtype`. gradient: its slice's dtype."""
        return DiskFormat(placement.moments, self._compact).nbytes(numel, dtype, placement, gradient)

    def reserve(self, nbytes: int) -> None:
        """Reserve the disk space for all of this engine's state. Raises OffloadError on a full disk."""
        self.swap_file.reserve(nbytes)

    def on_disk(self, numel: int, dtype: torch.dtype) -> Section:
        """Allocate space on disk for values, zero at first. Raises OffloadError on a full disk."""
        return self._stored([dtype], numel)[0]

    def record(
        self,
        values: Tensor,
        dtype: torch.dtype,
        tier: Tier,
        moments: int,
        weights: Callable[[], Values] | None,
    ) -> Record:
        """Make a record whose master is a copy of `values` in `dtype`; `make_moments` completes it.

        moments: how many there will be; on disk they have their space from the beginning. weights(): the bf16
        weights, if these may serve as the upper half of a master on disk.
        """
        if tier == "disk":
            format = DiskFormat(moments, self._compact)
            dtypes = format.record(dtype, weights is not None)
            first, *rest = self._stored(dtypes, values.numel())
            stored = SplitMaster(weights, first) if format.compact and weights is not None else first
            stored.write(values)
            return Record(tier, stored, tuple(rest))
        if tier == "host":
            master = self._empty_on_host(values.numel(), dtype).copy_(values.to(HOST))
        else:
            master = values.to(dtype, copy=True)
        return Record(tier, master)

    def moved(self, record: Record, tier: Tier, shard: Values, streamed: bool = False) -> Record:
        """Return a record moved to `tier`.

        The shard itself serves as an fp32 master if it is there, or on the device if the record is streamed
        there.
        """
        old = record.opened()
        device = HOST if tier == "host" else self.accelerator.device
        near = (device, self.accelerator.device) if streamed else (device,)
        serves = isinstance(shard, Tensor) and shard.device in near and shard.dtype is old.master.dtype
        master = shard if serves else old.master.to(device)
        return Record(tier, master, tuple(m.to(device) for m in old.moments))

    def weight_writer(self, shard: Values, master: Tensor) -> WeightWriter:
        """Make what sends the weights of a stepped `master` to `shard`."""
        return WeightWriter(self, shard, master)

    def join(self) -> None:
        """Make the device's later work wait for everything that is under way to it."""
        if "carrier" in self.__dict__:
            self.carrier.join()

    def make_moments(self, record: Record, moments: int) -> None:
        """Add zero moments to a record; on disk they exist already, as the file starts out as zeros."""
        master = record.master
        if isinstance(master, Tensor):
            record.moments = tuple(self._zeros(master, record.tier) for _ in range(moments))

    def _zeros(self, like: Tensor, tier: Tier) -> Tensor:
        if tier == "host":
            return self._empty_on_host(like.numel(), like.dtype).zero_()
        return torch.zeros_like(like)

    def _empty_on_host(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate host memory for a record; it need not be page-locked if the host's kernels step it."""
        if self._streamed:
            return self.accelerator.memory.empty_host((numel,), dtype)
        return torch.empty(numel, dtype=dtype, device=HOST)

    @cached_property
    def _host_kernels(self) -> Kernels:
        return accelz.host_kernels()

    def _stored(self, dtypes: Sequence[torch.dtype], numel: int) -> list[Section]:
        """Allocate adjacent sections of `numel` elements, each of whole pages."""
        sizes = [section_bytes(numel, dtype) for dtype in dtypes]
        place = self.swap_file.allocate(sum(sizes))
        ends = itertools.accumulate(sizes, initial=place)
        return [Section(self.swap_file, begin, numel, d) for begin, d in zip(ends, dtypes, strict=False)]
