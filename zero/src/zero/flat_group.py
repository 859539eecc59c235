"""Parameters of one unit that share a dtype and are all trainable or all frozen: one flat buffer.

Glossary
--------
home        the flat buffer in the parameters' own dtype.
cast buffer a flat buffer in an autocast dtype, which an fp32 group travels in under torch.autocast.
shard       this rank's slice of the parameters in their own dtype, shape (shard_numel,). Where the whole
            buffer stays (stages 0 to 2, one rank, persistent units, ranks with memory in common) it is a
            view of `home`. With offloaded parameters it is on the host, or on disk.
private     a copy of a common `home` that its user may write to, while a `zero.gathered` block lasts.
master      fp32 values of the shard, what the optimizer updates. For fp32 groups it *is* the shard
            where both are in the same memory.
record      the master and the optimizer's moments, wherever they are: of each sub-group one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from accelz.accelerator import Accelerator
from accelz.collectives import Group
from accelz.flat_buffer import FlatBuffer, dense_stride
from accelz.streams import Event
from zero import layout
from zero.communicator import Communicator, NamedHandle
from zero.layout import ParameterSpec
from zero.room import allocate
from zero.sub_group import SubGroup, sub_groups
from zero.tiers.joined import joined
from zero.tiers.placement import Placement
from zero.tiers.record import Record
from zero.tiers.stores import Stores
from zero.tiers.swap_file import Section
from zero.tiers.trace import Held
from zero.tiers.values import Values


class FlatGroup:
    """Flattens its parameters when built; `settle()` then leaves the shard, or shard and whole.

    unit: its name. parameters keep their identity; `dtype` is what they are cast to. shards: slices the
    buffer is cut in (1: replicated). shard: which one this rank owns. placement: where its state goes.
    """

    def __init__(
        self,
        stores: Stores,
        placement: Placement,
        unit: str,
        named: Sequence[tuple[str, nn.Parameter]],
        dtype: torch.dtype,
        shards: int,
        shard: int,
    ) -> None:
        self.unit = unit
        self.names = tuple(name for name, _ in named)
        self.parameters = tuple(parameter for _, parameter in named)
        self.dtype = dtype
        self.trainable = self.parameters[0].requires_grad
        specs = [ParameterSpec(name, tuple(p.shape), dense_stride(p), p.numel()) for name, p in named]
        self.layout = layout.plan(specs, shards, dtype.itemsize)
        self.window = self.layout.shard_slice(shard)
        self.pieces = self.layout.pieces(shard)
        self.placement = placement
        self.subs = tuple(sub_groups(placement))
        self._stores = stores
        self._accelerator: Accelerator = stores.accelerator
        self._cast_buffers: dict[torch.dtype, FlatBuffer] = {}
        self._private: FlatBuffer | None = None
        self._brought: tuple[Tensor, Event] | None = None  # the shard on the device, from when on
        self._read: Event | None = None  # the device's last copy from a shard on the host
        # Masters start from the values as they were given, not from their 16-bit rounding.
        wide = self.trainable and any(p.dtype.itemsize > dtype.itemsize for p in self.parameters)
        self.home: FlatBuffer = self._accelerator.flat_buffers.flatten(
            self.parameters, self.layout.slots, self.layout.numel, torch.float32 if wide else dtype
        )
        self.shard = self.home.data[self.window]

    @property
    def shards(self) -> int:
        return self.layout.shards

    @property
    def on_disk(self) -> bool:
        """Whether anything of it is."""
        tiers = (self.placement.params, self.placement.gradients, *(sub.tier for sub in self.subs))
        return "disk" in tiers

    @property
    def shard(self) -> Values:
        return self._shard

    @shard.setter
    def shard(self, values: Values) -> None:
        self._shard = values
        for sub in self.subs:
            sub.follow(values)

    @property
    def master(self) -> Values | None:
        """None of a frozen group; where the shard serves as it, the shard, in parts that count changes."""
        return joined([sub.kept.master for sub in self.subs]) if self.subs else None

    @property
    def widest(self) -> Values:
        """The most precise values there are: the master's, or a frozen group's own."""
        master = self.master
        return self.shard if master is None else master

    def settle(self, whole: bool, ranks: Group) -> None:
        """After the values are final: make the master, take on `dtype`, keep the whole buffer or part with
        it. ranks: those that the shards are spread over."""
        for sub in self.subs:
            if not self._will_serve(sub):
                self._make_record(sub)
        if self.home.data.dtype is not self.dtype:
            self._narrow()
        if not whole:
            self._part_with_whole(ranks)
        for sub in self.subs:
            if sub.record is None:
                sub.record = Record(sub.tier, sub.shard)

    def _will_serve(self, sub: SubGroup) -> bool:
        """Whether the shard is to be the master of a sub-group."""
        params = self.placement.params
        together = sub.tier == params != "disk" or (sub.visits and params == "device")
        return self.dtype.itemsize >= 4 and together

    def _make_record(self, sub: SubGroup) -> None:
        dtype = torch.promote_types(self.dtype, torch.float32)
        upper = (lambda: sub.shard) if self.dtype is torch.bfloat16 else None
        sub.record = self._stores.record(self._mine[sub.window], dtype, sub.tier, upper)

    def park(self) -> None:
        """Keep the shard on the host and give all memory of the device back, until `unpark`."""
        near = isinstance(self.shard, Tensor) and self.shard.device == self._accelerator.device
        if near and isinstance(self.shard, Tensor) and self._stores.resolve("host") == "host":
            self.shard = self._stores.keep(self.shard, "host")
            self.home.release()

    def unpark(self, whole: bool) -> None:
        """Back to where the placement says. whole: into the whole buffer, of which the rest is stale then."""
        if self.placement.params != "device" or not isinstance(self.shard, Tensor):
            return
        if whole and not self.home.materialized:
            allocate(self._stores, "to reload", self.unit, self.home.nbytes, self.home.materialize)
            self.shard = self._mine.copy_(self.shard)
        elif not whole:
            self.shard = self.shard.to(self._accelerator.device)

    @property
    def _mine(self) -> Tensor:
        return self.home.data[self.window]

    def _part_with_whole(self, ranks: Group) -> None:
        """Leave the whole buffer to all ranks in common, or nothing of it but the shard."""
        tier = self.placement.params
        common = self._accelerator.flat_buffers.share(self.home, ranks) if tier == "device" else None
        if common is not None:
            self.home = common
            self.shard = common.data[self.window]
            return
        self.shard = self._mine.clone() if tier == "device" else self._stores.keep(self._mine, tier)
        self.home.release()

    def _narrow(self) -> None:
        wide, self.home = self.home, self._accelerator.flat_buffers.empty_like(self.home, self.dtype)
        self.home.materialize()
        self._accelerator.kernels.scale_cast(self.home.data, wide.data)
        self.home.bind()
        wide.release()
        self.shard = self.home.data[self.window]

    @property
    def whole(self) -> Tensor:
        """The gathered values in the parameters' own dtype, shape (layout.numel,)."""
        return (self._private or self.home).data

    def held(self) -> Held:
        """Bytes of the device in use for the group."""
        buffers = [self.home, *self._cast_buffers.values(), *([self._private] if self._private else [])]
        whole = sum(b.nbytes for b in buffers if b.materialized)
        device = self._accelerator.device
        records = (sub for sub in self.subs if sub.record is not None)
        record = sum(sub.kept.bytes_on(device, sub.shard) for sub in records)
        if not isinstance(self.shard, Tensor) or self.shard.device != device:
            brought = 0 if self._brought is None else self._brought[0].nbytes
            return Held(parameters=brought, gathered=whole, optimizer=record)
        if self.shard.untyped_storage().data_ptr() == self.home.data.untyped_storage().data_ptr():
            return Held(parameters=self.home.nbytes, gathered=whole - self.home.nbytes, optimizer=record)
        return Held(parameters=self.shard.nbytes, gathered=whole, optimizer=record)

    def isolate(self) -> None:
        """Let the gathered parameters be this rank's own: no write to them reaches another rank."""
        if self.home.common and self._private is None:
            self._private = self._accelerator.flat_buffers.empty_like(self.home, self.dtype)
            self._private.materialize()
            self._private.data.copy_(self.home.data)
            self._private.bind()

    def rejoin(self) -> None:
        """End isolate()."""
        if self._private is not None:
            self._private = None
            self.home.bind()

    def buffer(self, cast: torch.dtype | None) -> FlatBuffer:
        """The buffer to gather into: `home`, or the cast buffer of an fp32 group under autocast."""
        dtype = self.dtype_in(cast)
        if dtype is self.dtype:
            return self.home
        if dtype not in self._cast_buffers:
            self._cast_buffers[dtype] = self._accelerator.flat_buffers.empty_like(self.home, dtype)
        return self._cast_buffers[dtype]

    def release(self, cast: torch.dtype | None) -> None:
        """Drop the bytes of `buffer`. One that there has never been is not made for it: out of memory may be
        why."""
        dtype = self.dtype_in(cast)
        buffer = self.home if dtype is self.dtype else self._cast_buffers.get(dtype)
        if buffer is not None:
            buffer.release()

    def dtype_in(self, cast: torch.dtype | None) -> torch.dtype:
        """What the group is gathered in; each dtype has its buffer."""
        return cast if cast is not None and self.dtype is torch.float32 else self.dtype

    def _open(self, cast: torch.dtype | None) -> FlatBuffer:
        buffer = self.buffer(cast)
        buffer.materialize()
        return buffer

    def start_gather(self, communicator: Communicator, cast: torch.dtype | None) -> NamedHandle | None:
        """Begin to fill the buffer from all ranks' shards; the cast happens before anything travels.

        None where nobody else has a shard.
        """
        nbytes = self.layout.numel * self.dtype_in(cast).itemsize
        buffer = allocate(self._stores, "to gather", self.unit, nbytes, lambda: self._open(cast))
        shard = buffer.data[self.window]
        with communicator.postponing() if communicator.in_pass else nullcontext():
            shard = self._mine_in(buffer)
        return None if self.shards == 1 else communicator.all_gather(self.unit, buffer.data, shard)

    def _mine_in(self, buffer: FlatBuffer) -> Tensor:
        """This rank's slice as it goes into `buffer`: the shard itself where it fits, else put there."""
        mine = buffer.data[self.window]
        with self._in_memory() as shard:
            if buffer is not self.home:
                near = partial(shard.to, mine.device, non_blocking=True)
                there = allocate(self._stores, "to gather", self.unit, shard.nbytes, near)
                self._accelerator.kernels.scale_cast(mine, there)
            elif shard.device == mine.device and self.shards > 1 and not isinstance(self.shard, Section):
                return shard
            else:
                mine.copy_(shard, non_blocking=True)
        return mine

    @contextmanager
    def _in_memory(self) -> Iterator[Tensor]:
        """The shard to be copied from in the block. On an asynchronous device the copy may come later; see
        `await_reads`."""
        if isinstance(self.shard, Section):
            with self._stores.read_ahead.use(self.shard) as shard:
                yield shard
        elif self._brought is not None:
            near, there = self._brought
            self._accelerator.streams.current().wait(there)
            yield near
        else:
            assert isinstance(self.shard, Tensor)
            try:
                yield self.shard
            finally:
                if self.shard.device != self._accelerator.device:
                    self._read = self._accelerator.streams.current().record()

    def start_read(self) -> bool:
        """Begin to read a shard that is on disk; False where as much as may be has been read ahead."""
        return not isinstance(self.shard, Section) or self._stores.read_ahead.begin(self.shard)

    def bring(self) -> None:
        """Begin to move a shard that is away towards the device, for a gather; ends with `take_back`."""
        shard, device = self.shard, self._accelerator.device
        if isinstance(shard, Section):
            self.start_read()
        elif isinstance(shard, Tensor) and shard.device != device and self._brought is None:
            make = partial(torch.empty_like, shard, device=device)
            near = allocate(self._stores, "for the shard of", self.unit, shard.nbytes, make)
            self._read = self._stores.carrier.send(shard, near)
            self._brought = near, self._read

    def take_back(self) -> None:
        """The device need not have the shard any more: its gather is done, or the weights change."""
        if self._brought is not None:
            self._accelerator.streams.current().wait(self._brought[1])
            self._brought = None

    def await_reads(self) -> None:
        """Return once the device has read what it was to read of a shard on the host: that may be written to
        then."""
        if self._read is not None:
            self._read.synchronize()
            self._read = None

    def bind(self, cast: torch.dtype | None) -> None:
        """Make the parameters views of the buffer that `cast` is gathered in, or of their private copy."""
        self._readable(cast).bind()

    def values(self, cast: torch.dtype | None) -> tuple[Tensor, ...]:
        """What `bind` would make of the parameters, in their order."""
        return self._readable(cast).views

    def _readable(self, cast: torch.dtype | None) -> FlatBuffer:
        buffer = self.buffer(cast)
        return self._private if self._private and buffer is self.home else buffer
