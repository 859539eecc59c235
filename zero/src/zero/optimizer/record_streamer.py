"""Records that come to the device for their step: which ones come when, and how many are there at one time.

In a step they come one turn ahead and go back after their own, so at most `STREAM_WINDOW` are there: one
arrives, one is stepped, one leaves. Compiled graphs know where there is more room: in the backward they
*prefetch* units, whose records stay after their step until the next forward sends them back.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from enum import Enum

import torch
from torch import Tensor

from accelz import Event
from zero.optimizer.group_step import scratch_bytes
from zero.optimizer.stepped import SteppedSubGroup
from zero.ranges import in_range
from zero.sharding.sharded_unit import ShardedUnit
from zero.sharding.sub_group import SubGroup
from zero.tiers.carrier import Carrier
from zero.tiers.room import allocate
from zero.tiers.stores import Stores
from zero.tiers.tier import ON_DEVICE, Opened, Record

STREAM_WINDOW = 3


class Residence(Enum):
    """Where a record is, and what that costs: bytes of the device, for a record of R bytes on the host.

    A master that is the shard on the device is not counted.
    """

    ON_HOST = "0: on the host"
    PREFETCHING = "R: on the host; the device is making a copy"
    ON_DEVICE = "R: on the device; what the host has is old"
    EVICTING = "R: on the device; it is being copied to the host"


class StreamedRecord:
    """The record of one sub-group. outwards: carries records back to the host, while `stores.carrier` brings
    others."""

    def __init__(self, stores: Stores, stepped: SteppedSubGroup, outwards: Carrier) -> None:
        self.residence = Residence.ON_HOST
        self.stepped = stepped
        self._accelerator = stores.accelerator
        self._stores = stores
        self._outwards = outwards
        self._home: Record | None = None  # the record on the host while there is a copy
        self._near: list[Tensor] = []  # master and moments on the device
        self._copied: Event | None = None  # the last copy, either way
        self._versions: list[int] = []  # of the originals, when the copy began

    @property
    def nbytes(self) -> int:
        """Bytes of the device that the record takes while it is there."""
        return sum(values.nbytes for values in self._values() if self._is_away(values))

    @property
    def may_keep_on_device(self) -> bool:
        """Whether it may stay on the device after its step. It may not where its master on the host is the
        shard, which the next gather reads."""
        master = self._host_record.opened().master
        return self.stepped.sub.shard is not master or not self._is_away(master)

    @property
    def kept_on_device(self) -> bool:
        """Whether the sub-group's record is the one on the device."""
        return self._host_record is not self.stepped.record

    @in_range("bring", lambda self: self.stepped.group.unit)
    def prefetch(self) -> None:
        """Begin to copy it to the device. Raises torch.OutOfMemoryError, having changed nothing."""
        assert self.residence is Residence.ON_HOST
        device, home = self._accelerator.device, self._values()
        near = [torch.empty_like(v, device=device) if self._is_away(v) else v for v in home]
        self._home, self._near, self._versions = self._host_record, near, self.stepped.versions()
        for there, here in zip(home, near, strict=True):
            if here is not there:
                self._copied = self._stores.carrier.send(there, here)
        self.residence = Residence.PREFETCHING

    def open(self) -> Opened:
        """The record on the device, to be stepped: work that is queued from now on finds it there."""
        if self.residence is Residence.PREFETCHING and self._versions != self.stepped.versions():
            self.discard_device_copy()
        if self.residence is Residence.ON_HOST:
            unit = self.stepped.group.unit
            allocate(self._stores, "for the optimizer state of", unit, self.nbytes, self.prefetch)
        if self._copied is not None:
            self._accelerator.streams.current().wait(self._copied)
        self.residence = Residence.ON_DEVICE
        return self._copy

    @property
    def _copy(self) -> Opened:
        """The copy on the device."""
        return Opened(self._near[0], tuple(self._near[1:]))

    def keep_on_device(self) -> None:
        """Let the copy on the device be the sub-group's record until it has landed on the host."""
        assert self.residence is Residence.ON_DEVICE
        self.stepped.sub.record = self._host_record.with_values(ON_DEVICE, self._copy)

    @in_range("evict", lambda self: self.stepped.group.unit)
    def evict(self) -> None:
        """Begin to copy it back."""
        assert self.residence is Residence.ON_DEVICE
        for there, here in zip(self._values(), self._near, strict=True):
            if here is not there:
                self._copied = self._outwards.send(here, there)
        self.residence = Residence.EVICTING

    def wait_evicted(self) -> None:
        """Wait until it is back; its memory on the device is then free."""
        assert self.residence is Residence.EVICTING
        if self._copied is not None:
            self._copied.synchronize()
        self._forget()

    def discard_device_copy(self) -> None:
        """Give up the copy on the device, stepped or not: the values on the host are the true ones."""
        if self._copied is not None:
            self._accelerator.streams.current().wait(self._copied)
        self._forget()

    def _forget(self) -> None:
        self.stepped.sub.record = self._host_record
        self.residence, self._home, self._copied = Residence.ON_HOST, None, None
        self._near.clear()

    @property
    def _host_record(self) -> Record:
        """The record on the host, wherever its true values are."""
        return self._home or self.stepped.record

    def _values(self) -> list[Tensor]:
        home = self._host_record.opened()
        return [home.master, *home.moments]

    def _is_away(self, values: Tensor) -> bool:
        return values.device != self._accelerator.device


class RecordStreamer:
    """The streamed records of an optimizer's sub-groups.

    show(stepped): makes the optimizer's views those of the present record. expected: whether units may be
    prefetched, because a step follows.
    """

    def __init__(
        self, stores: Stores, subs: Sequence[SteppedSubGroup], show: Callable[[SteppedSubGroup], None]
    ) -> None:
        self.expected = False
        self._show = show
        streamed_subs = [mine for mine in subs if mine.sub.streamed]
        self._streamed: dict[SubGroup, StreamedRecord] = {}
        self._passing: list[StreamedRecord] = []  # those that came in this step, in order
        if streamed_subs:
            outwards = stores.new_carrier()
            self._streamed = {mine.sub: StreamedRecord(stores, mine, outwards) for mine in streamed_subs}
        chunk = stores.accelerator.kernels.chunk
        self.scratch = max((scratch_bytes(mine.sub.numel, chunk) for mine in streamed_subs), default=0)

    def in_turn(self, subs: Sequence[SteppedSubGroup]) -> Generator[Opened, None, None]:
        """The record of each sub-group on the device, to be stepped. A record that was not prefetched goes
        back when the next one is asked for, and is back when the iterator is exhausted."""
        turns = [self._streamed[stepped.sub] for stepped in subs]
        try:
            for turn, streamed in enumerate(turns):
                if streamed.residence is Residence.ON_HOST:  # it comes now, and goes after its step
                    self._make_room()
                    self._passing.append(streamed)
                state = streamed.open()
                self._prefetch_next(turns[turn + 1 :])
                yield state
                self._leave(streamed)
        finally:
            self._clear()

    @property
    def passing_bytes(self) -> int:
        """The most bytes of the device that records take that come and go within a step."""
        return STREAM_WINDOW * max((streamed.nbytes for streamed in self._streamed.values()), default=0)

    def nbytes(self, unit: ShardedUnit) -> int:
        """Bytes of the device that the records of a unit take while they are there."""
        return sum(streamed.nbytes for streamed in self._of(unit))

    def prefetch(self, unit: ShardedUnit) -> None:
        """Begin to copy a unit's records to the device, if a step follows and there is room."""
        for streamed in self._of(unit) if self.expected else ():
            if streamed.residence is Residence.ON_HOST:
                self._try_prefetch(streamed)

    def evict(self, unit: ShardedUnit) -> None:
        """Begin to copy a unit's records back, if they have stayed."""
        for streamed in self._of(unit):
            if streamed.residence is Residence.ON_DEVICE:
                streamed.evict()

    def wait_evicted(self, unit: ShardedUnit) -> None:
        """Wait until a unit's records are back; those that have stayed go first."""
        self.evict(unit)
        for streamed in self._of(unit):
            if streamed.residence is Residence.EVICTING:
                self._return_to_host(streamed)

    def return_to_host(self, sub: SubGroup) -> None:
        """Have the sub-group's record on the host again, if it is one that is streamed to the device."""
        if sub.streamed:
            self._return_to_host(self._streamed[sub])

    def return_all_to_host(self) -> None:
        """Have all records on the host again."""
        for streamed in self._streamed.values():
            self._return_to_host(streamed)

    def device_bytes(self) -> int:
        """Bytes of the device in use, besides the sub-groups' records."""
        here = (v for v in self._streamed.values() if v.residence is not Residence.ON_HOST)
        return sum(streamed.nbytes for streamed in here if not streamed.kept_on_device)

    def dropped(self) -> None:
        """There will be no step with the gradients so far."""
        for streamed in self._streamed.values():
            here = streamed.residence in (Residence.PREFETCHING, Residence.ON_DEVICE)
            if here and not streamed.kept_on_device:
                streamed.discard_device_copy()

    def relieve(self, nbytes: int) -> int:
        """Evict records that are not being stepped, until `nbytes` are freed; returns the bytes
        freed."""
        freed = 0
        for streamed in self._streamed.values():
            travels = streamed.residence in (Residence.PREFETCHING, Residence.EVICTING)
            if freed < nbytes and (travels or streamed.kept_on_device):
                freed += streamed.nbytes
                self._return_to_host(streamed)
        return freed

    def _of(self, unit: ShardedUnit) -> Iterator[StreamedRecord]:
        subs = (sub for group in unit.groups for sub in group.subs)
        return (self._streamed[sub] for sub in subs if sub.streamed)

    def _prefetch_next(self, following: Iterable[StreamedRecord]) -> None:
        """Let the next record that is on the host come, if the window and the device have room."""
        streamed = next((v for v in following if v.residence is Residence.ON_HOST), None)
        if streamed is not None and self._make_room() and self._try_prefetch(streamed):
            self._passing.append(streamed)

    def _try_prefetch(self, streamed: StreamedRecord) -> bool:
        """Whether there was room. If not, the record comes on its turn, when others have gone."""
        try:
            streamed.prefetch()
        except torch.OutOfMemoryError:
            return False
        return True

    def _leave(self, streamed: StreamedRecord) -> None:
        """A record has been stepped: it goes if it came in this step, or if it may not stay."""
        if streamed not in self._passing and streamed.may_keep_on_device:
            streamed.keep_on_device()
            self._show(streamed.stepped)
            return
        streamed.evict()
        if streamed not in self._passing:
            self._passing.append(streamed)

    def _make_room(self) -> bool:
        """Wait for records that are leaving, oldest first; returns whether the window has room for one
        more."""
        while len(self._passing) >= STREAM_WINDOW and self._passing[0].residence is Residence.EVICTING:
            self._return_to_host(self._passing[0])
        return len(self._passing) < STREAM_WINDOW

    def _clear(self) -> None:
        """End a step, even one that failed: none that was passing is on the device any more."""
        while self._passing:
            self._return_to_host(self._passing[0])

    def _return_to_host(self, streamed: StreamedRecord) -> None:
        """Have it on the host again: stepped if its step is over, otherwise as it was."""
        kept = streamed.kept_on_device
        if kept and streamed.residence is Residence.ON_DEVICE:
            streamed.evict()
        if streamed.residence is Residence.EVICTING:
            streamed.wait_evicted()
        elif streamed.residence is not Residence.ON_HOST:
            streamed.discard_device_copy()
        if streamed in self._passing:
            self._passing.remove(streamed)
        if kept:
            self._show(streamed.stepped)
