"""Makes room for state in its tier. One for each engine."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

import accelz
from accelz.accelerator import Accelerator
from accelz.flat_buffer import HOST
from accelz.kernels import Kernels
from zero.settings.offload import Tier
from zero.tiers.carrier import Carrier
from zero.tiers.outlet import Outlet
from zero.tiers.pipeline import Pipeline
from zero.tiers.placement import Placement
from zero.tiers.read_ahead import ReadAhead
from zero.tiers.record import DiskFormat, Record, section_bytes
from zero.tiers.split import SplitMaster
from zero.tiers.swap_file import Section, SwapFile
from zero.tiers.values import Values


class Stores:
    """Where the device is the host, the host tier is the device's memory: nothing is there twice.

    folder: for what is on disk. compact: keep of masters on disk what bf16 weights lack. visits: records on
    the host are page-locked, to be stepped on the device. relieve: frees about so many bytes of the device if
    it can; returns how many.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        folder: Path | None,
        compact: bool,
        visits: bool,
    ) -> None:
        self.accelerator = accelerator
        self.relieve: Callable[[int], int] = lambda nbytes: 0
        self.pipeline = Pipeline(accelerator.memory)
        self._folder = folder
        self._compact = compact
        self._visits = visits

    @cached_property
    def carrier(self) -> Carrier:
        """Made when something moves for the first time: it takes a stream."""
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
        """For tensors on `device`: the accelerator's, or the host's."""
        return self.accelerator.kernels if device == self.accelerator.device else self._host_kernels

    def resolve(self, tier: Tier) -> Tier:
        """The tier that `tier` is on this device."""
        return "device" if tier == "host" and self.accelerator.device.type == HOST.type else tier

    def keep(self, values: Tensor, tier: Tier) -> Values:
        """The values in `tier`: a copy, except where that is the device, where they are."""
        if tier == "host":
            return self.accelerator.memory.empty_host(tuple(values.shape), values.dtype).copy_(values)
        if tier == "disk":
            stored = self.on_disk(values.numel(), values.dtype)
            stored.write(values)
            return stored
        return values

    def disk_bytes(self, numel: int, dtype: torch.dtype, placement: Placement, gradient: torch.dtype) -> int:
        """What a group of `numel` elements in `dtype` keeps on disk. gradient: dtype of its reduced slice."""
        return DiskFormat(placement.moments, self._compact).nbytes(numel, dtype, placement, gradient)

    def reserve(self, nbytes: int) -> None:
        """Take the space on disk for all of this engine's state. Raises OffloadError on a full disk."""
        self.swap_file.reserve(nbytes)

    def on_disk(self, numel: int, dtype: torch.dtype) -> Section:
        """A place on disk for values, zero at first. Raises OffloadError on a full disk."""
        return self._stored([dtype], numel)[0]

    def record(
        self,
        values: Tensor,
        dtype: torch.dtype,
        tier: Tier,
        moments: int,
        weights: Callable[[], Values] | None,
    ) -> Record:
        """A record whose master is a copy of `values` in `dtype`; `make_moments` completes it.

        moments: how many there will be, which on disk have their places from the beginning. weights: gives
        the bf16 weights, where these may serve as the upper half of a master on disk.
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

    def moved(self, record: Record, tier: Tier, shard: Values, visits: bool = False) -> Record:
        """A record in the other memory. The shard itself serves as an fp32 master there, and on the device
        where the record visits that."""
        old = record.opened()
        device = HOST if tier == "host" else self.accelerator.device
        near = (device, self.accelerator.device) if visits else (device,)
        serves = isinstance(shard, Tensor) and shard.device in near and shard.dtype is old.master.dtype
        master = shard if serves else old.master.to(device)
        return Record(tier, master, tuple(m.to(device) for m in old.moments))

    def outlet(self, shard: Values, master: Tensor) -> Outlet:
        """What sends the weights of a stepped `master` to `shard`."""
        return Outlet(self, shard, master)

    def join(self) -> None:
        """Let the device's later work start after everything that is under way to it."""
        if "carrier" in self.__dict__:
            self.carrier.join()

    def make_moments(self, record: Record, moments: int) -> None:
        """Zeros; on disk they are there already, as the file begins with them."""
        master = record.master
        if isinstance(master, Tensor):
            record.moments = tuple(self._zeros(master, record.tier) for _ in range(moments))

    def _zeros(self, like: Tensor, tier: Tier) -> Tensor:
        if tier == "host":
            return self._empty_on_host(like.numel(), like.dtype).zero_()
        return torch.zeros_like(like)

    def _empty_on_host(self, numel: int, dtype: torch.dtype) -> Tensor:
        """For a record; where the host's kernels step it, it need not be page-locked."""
        if self._visits:
            return self.accelerator.memory.empty_host((numel,), dtype)
        return torch.empty(numel, dtype=dtype, device=HOST)

    @cached_property
    def _host_kernels(self) -> Kernels:
        return accelz.host_kernels()

    def _stored(self, dtypes: Sequence[torch.dtype], numel: int) -> list[Section]:
        """Sections of `numel` elements one after another, each of whole pages."""
        sizes = [section_bytes(numel, dtype) for dtype in dtypes]
        place = self.swap_file.allocate(sum(sizes))
        ends = itertools.accumulate(sizes, initial=place)
        return [Section(self.swap_file, begin, numel, d) for begin, d in zip(ends, dtypes, strict=False)]
