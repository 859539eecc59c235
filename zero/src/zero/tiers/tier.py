"""The tiers: the device's memory, the host's, a disk; and an optimizer's state of one sub-group in its tier.

What differs between tiers is in this module alone.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from accelz import HOST, Accelerator
from accelz.updates import REMAINDER
from zero.config.offload import Kind, Offload
from zero.tiers.split_master import SplitMaster
from zero.tiers.swap_file import Section, section_bytes
from zero.tiers.values import Column, Stored, Values, put

if TYPE_CHECKING:
    from zero.tiers.stores import Stores

Weights = Callable[[], Values]


@dataclass(frozen=True)
class Opened:
    """A record in memory, to be stepped. All (numel,), but for the scales of codes, on one device.

    master: of a split one, the remainders.
    """

    master: Tensor
    moments: tuple[Tensor, ...]

    @property
    def is_split(self) -> bool:
        """Whether it is stepped together with the weights, and writes them."""
        return self.master.dtype is REMAINDER


@dataclass
class Record:
    """Master and moments of one sub-group.

    master: the original values of the parameters, fp32 (fp64 for fp64 parameters); of bf16 ones perhaps
    split. moments: one value per element each, in the master's dtype or in bf16; or codes in 8 bits, and then
    scales of their blocks. tier: where they are, except a master that is the shard, which stays with it. On
    disk a record is one contiguous stretch, master first, each section in whole pages.
    """

    tier: Tier
    master: Values
    moments: tuple[Values, ...] = ()

    @property
    def columns(self) -> tuple[Values, ...]:
        """What is kept: the master, or the remainders of a split one, and the moments."""
        first = self.master.remainder if isinstance(self.master, SplitMaster) else self.master
        return first, *self.moments

    def opened(self) -> Opened:
        """Return master and moments of a record that is in memory."""
        master, *moments = (values for values in self.columns if isinstance(values, Tensor))
        return Opened(master, tuple(moments))

    def with_values(self, tier: Tier, state: Opened) -> Record:
        """Return the record with its values in other memory. state: as `opened` returns it."""
        master: Values = state.master
        if isinstance(self.master, SplitMaster):
            master = SplitMaster(self.master.weights, state.master)
        return Record(tier, master, state.moments)

    def bytes_on(self, device: torch.device, shard: Values) -> int:
        """Return the bytes in use on `device`, without those of a master that is the shard itself."""
        values = [v for v in self.columns if v is not shard]
        return sum(v.nbytes for v in values if isinstance(v, Tensor) and v.device == device)

    @property
    def sections(self) -> list[Section]:
        """The sections of a record on disk, in the order in which they lie there."""
        return [v for v in self.columns if isinstance(v, Section)]


class Tier(ABC):
    """Where state may be between its uses.

    name: as in the settings. Exactly one of these holds. near: it is the device's memory. in_host_memory: it
    is the host's, where there is one besides the device's. stored: values must be read to be used.
    """

    name: ClassVar[str]
    near: ClassVar[bool] = False
    in_host_memory: ClassVar[bool] = False
    stored: ClassVar[bool] = False

    def __repr__(self) -> str:
        return self.name

    def on(self, accelerator: Accelerator) -> Tier:
        """Return the tier that this one amounts to on a device."""
        return self

    @property
    def beyond_budget(self) -> Tier:
        """The tier of what is to be here, but finds no room within a budget of host memory."""
        return self

    def memory(self, accelerator: Accelerator) -> torch.device:
        """Return the device of values that are used where they are, and whose kernels step them."""
        return HOST

    def nbytes(self, numel: int, *columns: Column) -> int:
        """Return the bytes that these columns of `numel` elements take here, one after another."""
        return sum(column.nbytes(numel) for column in columns)

    def place(self, stores: Stores, numel: int, dtype: torch.dtype) -> Stored | None:
        """Return a place for values yet to come; None where they need none."""
        return None

    @abstractmethod
    def keep(self, stores: Stores, values: Tensor) -> Values:
        """Return the values here: a copy, or in the device's memory the values themselves."""

    def new_record(
        self, stores: Stores, values: Tensor, dtype: torch.dtype, moments: Sequence[Column], weights: Weights
    ) -> Record:
        """Make a record whose master is a copy of `values`; `add_moments` completes it.

        dtype: of the master, or of remainders. moments: those that there will be; on disk they have their
        space from the beginning. weights(): the bf16 weights, which remainders are of.
        """
        kept = self._make(stores, torch.empty, values.numel(), dtype)
        return Record(self, _filled(kept, values.to(kept.device), weights))

    def add_moments(self, stores: Stores, record: Record, moments: Sequence[Column]) -> None:
        """Add zero moments to a record that is here."""
        numel = record.master.numel()
        record.moments = tuple(
            self._make(stores, torch.zeros, column.numel(numel), column.dtype) for column in moments
        )

    def _make(self, stores: Stores, make: Callable[..., Tensor], numel: int, dtype: torch.dtype) -> Tensor:
        return make(numel, dtype=dtype, device=self.memory(stores.accelerator))

    def moved(self, stores: Stores, record: Record, shard: Values, streamed: bool) -> Record:
        """Return a record in memory moved here.

        The shard itself serves as an fp32 master if it is here, or on the device if the record is streamed
        there.
        """
        old, here = record.opened(), self.memory(stores.accelerator)
        near = (here, stores.accelerator.device) if streamed else (here,)
        if isinstance(shard, Tensor) and shard.device in near and shard.dtype is old.master.dtype:
            master = shard
        else:
            master = old.master.to(here)
        return record.with_values(self, Opened(master, tuple(m.to(here) for m in old.moments)))


class DeviceMemory(Tier):
    name = "device"
    near = True

    def memory(self, accelerator: Accelerator) -> torch.device:
        return accelerator.device

    def keep(self, stores: Stores, values: Tensor) -> Tensor:
        return values


class HostMemory(Tier):
    name = "host"
    in_host_memory = True

    def on(self, accelerator: Accelerator) -> Tier:
        return ON_DEVICE if accelerator.device.type == HOST.type else self

    @property
    def beyond_budget(self) -> Tier:
        return ON_DEVICE

    def keep(self, stores: Stores, values: Tensor) -> Tensor:
        return stores.accelerator.memory.empty_host(tuple(values.shape), values.dtype).copy_(values)

    def _make(self, stores: Stores, make: Callable[..., Tensor], numel: int, dtype: torch.dtype) -> Tensor:
        if (
            stores.offload.streams
        ):  # page-locked, for the device to copy from; the host's kernels need not that
            return stores.accelerator.memory.empty_host((numel,), dtype).zero_()
        return super()._make(stores, make, numel, dtype)


class Disk(Tier):
    """A rank's swap file in a folder."""

    name = "disk"
    stored = True

    def folder(self, offload: Offload) -> Path:
        """Return the folder of the swap file."""
        assert offload.path is not None
        return offload.path

    def nbytes(self, numel: int, *columns: Column) -> int:
        return sum(section_bytes(column.numel(numel), column.dtype) for column in columns)

    def place(self, stores: Stores, numel: int, dtype: torch.dtype) -> Section:
        return self._allocate(stores, numel, [Column(dtype)])[0]

    def keep(self, stores: Stores, values: Tensor) -> Section:
        section = self.place(stores, values.numel(), values.dtype)
        section.write(values)
        return section

    def new_record(
        self, stores: Stores, values: Tensor, dtype: torch.dtype, moments: Sequence[Column], weights: Weights
    ) -> Record:
        first, *rest = self._allocate(stores, values.numel(), [Column(dtype), *moments])
        return Record(self, _filled(first, values, weights), tuple(rest))

    def add_moments(self, stores: Stores, record: Record, moments: Sequence[Column]) -> None:
        """They exist already, as the file starts out as zeros."""

    def _allocate(self, stores: Stores, numel: int, columns: Sequence[Column]) -> list[Section]:
        """Allocate adjacent sections of `numel` elements, each of whole pages, zero at first.

        Raises OffloadError on a full disk.
        """
        file, sizes = stores.swap_file(self), [self.nbytes(numel, column) for column in columns]
        ends = itertools.accumulate(sizes, initial=file.allocate(sum(sizes)))
        return [
            Section(file, begin, column.numel(numel), column.dtype)
            for begin, column in zip(ends, columns, strict=False)
        ]


def _filled(kept: Values, values: Tensor, weights: Weights) -> Values:
    """Return a master with these values. kept: where it is, or where its remainders are."""
    master = SplitMaster(weights, kept) if kept.dtype is REMAINDER else kept
    put(master, slice(0, values.numel()), values)
    return master


ON_DEVICE, ON_HOST, ON_DISK = DeviceMemory(), HostMemory(), Disk()
TIERS = (ON_DEVICE, ON_HOST, ON_DISK)
_BY_NAME: dict[str, Tier] = {tier.name: tier for tier in TIERS}


def wanted(offload: Offload, kind: Kind) -> Tier:
    """Return the tier that the settings ask for; of what they say nothing about, the device."""
    return _BY_NAME[getattr(offload, kind) or ON_DEVICE.name]
