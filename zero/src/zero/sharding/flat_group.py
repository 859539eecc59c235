"""A flat buffer for parameters of one unit that share a dtype, travel alike, and are stepped alike or frozen.

Glossary
--------
home        the flat buffer in the parameters' own dtype.
converted   a flat buffer for another gather format: in autocast's dtype, if autocast casts the values before
            each use, or with values that were rounded to 8 bits.
shard       this rank's slice of the parameters in their own dtype, shape (shard_numel,). If the whole buffer
            stays (stages 0 to 2, one rank, persistent units, ranks with common memory) it is a view of
            `home`. If parameters are offloaded it is on the host or on disk.
private     a copy of `home` for a `zero.gathered` block, made if `home` is common and the block may write, or
            if a forward under way computes with another buffer and `home` is released before its backward.
master      fp32 values of the shard, which the optimizer updates. For fp32 groups it *is* the shard if both
            are in the same memory. Of bf16 groups it may be split into the shard and remainders.
record      the master and the optimizer's moments, wherever they are; one for each sub-group.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import InitVar, dataclass
from functools import partial

import torch
from torch import Tensor, nn

from accelz import Accelerator, FlatBuffer
from zero.communication.communicator import Communicator, NamedHandle
from zero.communication.job import explained
from zero.communication.mesh import Mesh
from zero.communication.quantised import Quantised, Sent
from zero.sharding.binding import Binding
from zero.sharding.distributed import follow_local, local_of
from zero.sharding.gather_format import EXACT, GatherFormat, GatherOptions
from zero.sharding.layout import FlatLayout
from zero.sharding.own_codes import OwnCodes
from zero.sharding.shard_source import ShardSource
from zero.sharding.sub_group import SubGroup, sub_groups
from zero.tiers.carrier import SideStreamWork
from zero.tiers.device_bytes import DeviceBytes, held_bytes
from zero.tiers.placement import Placement
from zero.tiers.room import allocate, room_for
from zero.tiers.stores import Stores
from zero.tiers.swap_file import Section
from zero.tiers.tier import Record
from zero.tiers.values import Stored, Values, joined, lasting

Pending = NamedHandle | SideStreamWork
"""A transfer under way to or from a buffer."""


@dataclass(eq=False, repr=False)
class FlatGroup:
    """A flat buffer: flattens its parameters when built; `finalize_shards()` leaves the shard, or both.

    unit: the unit's name. local: the tensors that have the parameters' values on this rank, see
    `distributed`. Parameters keep their identity and are cast to `dtype`. mesh: the ranks that it is
    spread over; each of them has all of it if the layout has one slice. placement: where its state goes.
    gather_options: what the values may be converted to on their way.
    """

    stores: Stores
    placement: Placement
    unit: str
    named: InitVar[Sequence[tuple[str, nn.Parameter]]]
    dtype: torch.dtype
    mesh: Mesh
    layout: FlatLayout
    gather_options: GatherOptions

    def __post_init__(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        self.names = tuple(name for name, _ in named)
        self.parameters = tuple(parameter for _, parameter in named)
        self.trainable = self.parameters[0].requires_grad
        local = self.local = tuple(map(local_of, self.parameters))
        shard = self.mesh.shards.rank if self.layout.shards > 1 else 0
        self.window = self.layout.shard_slice(shard)
        self.pieces = self.layout.pieces(shard)
        self.subs = tuple(sub_groups(self.placement))
        self._accelerator: Accelerator = self.stores.accelerator
        self._formats: dict[GatherFormat, GatherFormat] = {}  # of the group, by the unit's
        self._converted: dict[GatherFormat, FlatBuffer] = {}
        self._travelling: dict[GatherFormat, Quantised] = {}
        self._private: FlatBuffer | None = None
        self._codes = OwnCodes(self.parameters) if self.gather_options.own else None
        # Masters start from the values as given, not from their 16-bit rounding.
        wide = self.trainable and any(p.dtype.itemsize > self.dtype.itemsize for p in local)
        self.home: FlatBuffer = self._accelerator.flat_buffers.flatten(
            local, self.layout.slots, self.layout.numel, torch.float32 if wide else self.dtype
        )
        self.binding = Binding(self.names, self.home)
        self.source = ShardSource(self.stores, self.unit, self.home.data[self.window])
        self.shard = self.source.shard

    @property
    def shards(self) -> int:
        return self.layout.shards

    @property
    def shard(self) -> Values:
        return self.source.shard

    @shard.setter
    def shard(self, values: Values) -> None:
        self.source.shard = values
        for sub in self.subs:
            sub.shard = sub.of(values)

    @property
    def master(self) -> Values | None:
        """The masters of all sub-groups as one; the shard itself where it serves as master.

        None for a frozen group.
        """
        return joined([sub.record.master for sub in self.subs]) if self.subs else None

    @property
    def overwritten(self) -> bool:
        """Whether a step overwrites the shard, or part of it, from a master in other memory. It reads the
        shard of split ones."""
        return not (self.placement.splits or all(sub.shard_serves for sub in self.subs))

    @property
    def widest(self) -> Values:
        """The most precise values there are: the master, or a frozen group's shard."""
        master = self.master
        return self.shard if master is None else master

    def room_for_whole(self, dtype: torch.dtype) -> AbstractContextManager[None]:
        """Wrap an operation that needs a whole buffer beside the unit's own; see `room_for`."""
        nbytes = self.layout.numel * dtype.itemsize
        return room_for(self._accelerator, "for whole values of", self.unit, nbytes)

    def finalize_shards(self, whole: bool) -> None:
        """Make masters, convert to `dtype`, and keep only the shard unless the whole buffer stays.

        Called once the values are final.
        """
        served = [s for s in self.subs if self.placement.shard_serves(self.dtype.itemsize, s.tier)]
        for sub in self.subs:
            if sub not in served:
                self._make_record(sub)
        if self.home.data.dtype is not self.dtype:
            self._narrow()
        if not whole:
            self._part_with_whole()
        for sub in served:
            sub.record = Record(sub.tier, sub.shard)
        for parameter, local in zip(self.parameters, self.local, strict=True):
            if parameter.dtype is not local.dtype:
                follow_local(parameter)

    def _make_record(self, sub: SubGroup) -> None:
        dtype, moments = self.placement.master, self.placement.moments
        values = self._mine[sub.window]
        sub.record = sub.tier.new_record(self.stores, values, dtype, moments, lambda: sub.shard)

    def offload_state(self) -> None:
        """Move the shard to the host and give back all device memory, until `reload_state`."""
        shard = self.source.resting
        if shard is not None and not self.stores.host.near:
            self.shard = self.stores.host.keep(self.stores, shard)
            self.home.release()

    def reload_state(self, whole: bool) -> None:
        """End `offload_state`: move the shard back to where the placement says.

        whole: into the whole buffer, whose other slices must then be gathered.
        """
        shard = self.shard
        if not self.placement.params.near or self.source.resting is not None or isinstance(shard, Stored):
            return
        if whole:
            allocate(self.stores, "to reload", self.unit, self.home.nbytes, self.home.materialize)
            self.shard = self._mine.copy_(shard)
        else:
            back = partial(shard.to, self._accelerator.device)
            self.shard = allocate(self.stores, "to reload", self.unit, shard.nbytes, back)

    @property
    def _mine(self) -> Tensor:
        return self.home.data[self.window]

    def _part_with_whole(self) -> None:
        """Move the whole buffer into memory common to all ranks, or release it and keep the shard."""
        tier = self.placement.params
        here = tier.near and self.gather_options.quant_dtype is None  # shards do not hold codes
        share, ranks = self._accelerator.flat_buffers.share, self.mesh.shards
        common = explained(lambda: share(self.home, ranks), ranks.timeout) if here else None
        if common is not None:
            self.home = common
            self.binding.bind(common)
            self.shard = common.data[self.window]
            return
        self.shard = self._mine.clone() if tier.near else tier.keep(self.stores, self._mine)
        self.home.release()

    def _narrow(self) -> None:
        wide, self.home = self.home, self._accelerator.flat_buffers.empty_like(self.home, self.dtype)
        self.home.materialize()
        self._accelerator.kernels.scale_cast(self.home.data, wide.data)
        self.binding.bind(self.home)
        wide.release()
        self.shard = self.home.data[self.window]

    @property
    def whole(self) -> Tensor:
        """The gathered values in the parameters' own dtype, shape (layout.numel,)."""
        return (self._private or self.home).data

    def held(self) -> DeviceBytes:
        """Return the bytes of the device in use for the group."""
        buffers = [self.home, *self._converted.values(), *([self._private] if self._private else [])]
        whole = sum(map(held_bytes, buffers))
        whole += sum(quantised.nbytes for quantised in self._travelling.values())
        device = self._accelerator.device
        record = sum(sub.record.bytes_on(device, sub.shard) for sub in self.subs)
        shard, home = self.source.resting, self.home.data
        own = self.source.brought_bytes if shard is None else shard.nbytes
        if shard is not None and shard.untyped_storage().data_ptr() == home.untyped_storage().data_ptr():
            own, whole = self.home.nbytes, whole - self.home.nbytes
        return DeviceBytes(parameters=own, gathered=whole, optimizer=record)

    def isolate(self, beside: GatherFormat) -> None:
        """Make the gathered parameters a `private` copy if they may not be views of `home`.

        Then no write to them reaches another rank, and what is computed with them stays valid up to its
        backward, longer than `home`. beside: the format that a forward under way computes in.
        """
        if self._private is None and (self.home.common or self.gather_format(beside) != EXACT):
            self._private = allocate(self.stores, "for a copy of", self.unit, self.home.nbytes, self._copy)
            self.binding.bind(self._private)

    def _copy(self) -> FlatBuffer:
        copy = self._accelerator.flat_buffers.empty_like(self.home, self.dtype)
        copy.materialize()
        copy.data.copy_(self.home.data)
        return copy

    def rejoin(self, bound: GatherFormat) -> None:
        """End isolate(): if the parameters were views of a copy, bind them to the buffer of `bound`."""
        if self._private is not None:
            self._private = None
            self.bind(bound)

    def buffer(self, fmt: GatherFormat) -> FlatBuffer:
        """Return the buffer for a format of the group: `home` for exact values, else a converted one."""
        if fmt == EXACT:
            return self.home
        if fmt not in self._converted:
            dtype = self.gather_options.buffer_dtype(fmt, self.dtype)
            with lasting():
                self._converted[fmt] = self._accelerator.flat_buffers.empty_like(self.home, dtype)
        return self._converted[fmt]

    def nbytes(self, fmt: GatherFormat) -> int:
        """Return the bytes of the buffer to gather into."""
        return self._nbytes(self.gather_format(fmt))

    def _nbytes(self, fmt: GatherFormat) -> int:
        return self.layout.numel * self.gather_options.buffer_dtype(fmt, self.dtype).itemsize

    def release(self, fmt: GatherFormat) -> None:
        """Drop the bytes of `buffer(fmt)`, if it was ever made: memory may have run out before."""
        fmt = self.gather_format(fmt)
        self._travelling.pop(fmt, None)
        buffer = self.home if fmt == EXACT else self._converted.get(fmt)
        if buffer is not None:
            buffer.release()

    def gather_format(self, fmt: GatherFormat) -> GatherFormat:
        """Return what of a unit's format applies to the group; each has its own buffer."""
        found = self._formats.get(fmt)
        if found is None:
            found = self._formats[fmt] = self.gather_options.gather_format(fmt, self.dtype)
        return found

    def start_gather(self, communicator: Communicator, fmt: GatherFormat) -> list[Pending]:
        """Begin to fill the buffer from all ranks' shards; return what to wait for before `finish_gather`.

        Values are cast, or rounded to codes, before anything travels. A shard that is away is copied and cast
        concurrently with the computation. Nothing travels between ranks if no other rank has a shard.
        """
        room, ranks = self._opened(self.gather_format(fmt)), self.mesh.shards
        near = self.source.resting
        begun: list[Pending] = []
        if near is not None:
            for whole, mine in self._put(room, near, communicator):
                begun.append(communicator.all_gather(self.unit, whole, mine, ranks))
            return begun
        with self.stores.carrier.beside() as work:
            for whole, mine in self._put_from_away(room, communicator):
                begun.append(communicator.all_gather(self.unit, whole, mine, ranks))
        return [*begun, work]

    def finish_gather(self, fmt: GatherFormat) -> None:
        """Unpack values that travelled as codes, after the gather has been waited for."""
        if self._travelling and (fmt := self.gather_format(fmt)) in self._travelling:
            self._travelling[fmt].unpack(self._accelerator.kernels, self._materialized(fmt).data)
            del self._travelling[fmt]
        if self._codes is not None and self.binding.buffer is self._converted.get(self.gather_format(fmt)):
            self._codes.show(self.dtype)  # which are others since they were bound

    def _opened(self, fmt: GatherFormat) -> FlatBuffer | Quantised:
        """Make room for what travels: the whole buffer, or codes that `finish_gather` unpacks."""
        if fmt.quant_dtype is None or self._codes is not None:
            return self._materialized(fmt)
        numel = self.layout.numel
        make = partial(Quantised, numel, fmt.quant_dtype, self._accelerator.device)
        codes = allocate(self.stores, "to gather", self.unit, Quantised.nbytes_of(numel), make)
        self._travelling[fmt] = codes
        return codes

    def _materialized(self, fmt: GatherFormat) -> FlatBuffer:
        def materialized() -> FlatBuffer:
            buffer = self.buffer(fmt)
            buffer.materialize()
            return buffer

        return allocate(self.stores, "to gather", self.unit, self._nbytes(fmt), materialized)

    def _put_from_away(self, room: FlatBuffer | Quantised, communicator: Communicator) -> Sequence[Sent]:
        """Do as `_put` with a shard that is on the host or on disk."""
        postponing = communicator.postponing_disk_errors() if communicator.in_pass else nullcontext()
        away = self.source.in_memory() if room is self.home else self.source.on_device()
        with postponing, away as shard:
            return self._put(room, shard, communicator)
        zeros = partial(torch.zeros, self.layout.shard_numel, dtype=self.dtype, device=room.data.device)
        nbytes = self.layout.shard_numel * self.dtype.itemsize  # the disk has failed: others wait for values
        return self._put(room, allocate(self.stores, "to gather", self.unit, nbytes, zeros), communicator)

    def _put(self, room: FlatBuffer | Quantised, shard: Tensor, communicator: Communicator) -> Sequence[Sent]:
        """Put this rank's values in `room`; return what to gather."""
        if isinstance(room, Quantised):
            room.put(self._accelerator.kernels, self.window, shard)
            return room.sent(self.window)
        if self._codes is not None and room is not self.home:
            reduce = partial(self._largest, communicator)
            self._codes.put(room.data[self.window], self.pieces, shard, reduce)
            sent = room.data.view(torch.uint8)
            return [(sent, sent[self.window])] if self.shards > 1 else ()
        if room is not self.home:
            self._accelerator.kernels.scale_cast(room.data[self.window], shard)
        elif shard.device == room.data.device and self.shards > 1 and not isinstance(self.shard, Section):
            return [(room.data, shard)]
        else:
            room.data[self.window].copy_(shard, non_blocking=True)
        return [(room.data, room.data[self.window])] if self.shards > 1 else ()

    def _largest(self, communicator: Communicator, numbers: Tensor) -> None:
        if self.shards > 1:
            communicator.all_reduce(self.unit, numbers, self.mesh.shards, "max").wait()

    def bind(self, fmt: GatherFormat) -> None:
        """Make the parameters views of the buffer that `fmt` is gathered in, or of their private copy."""
        buffer = self._readable(fmt)
        if self._codes is not None:
            self._codes.hide()
        self.binding.bind(buffer)
        if self._codes is not None and buffer is self._converted.get(self.gather_format(fmt)):
            self._codes.show(self.dtype)

    def values(self, fmt: GatherFormat) -> tuple[Tensor, ...]:
        """Return the views that `bind` would make the parameters, in their order."""
        return self._readable(fmt).views

    def _readable(self, fmt: GatherFormat) -> FlatBuffer:
        buffer = self.buffer(self.gather_format(fmt))
        return self._private if self._private and buffer is self.home else buffer
