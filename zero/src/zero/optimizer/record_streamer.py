"""Records that come to the device for their step: which ones come when, and how many are there at one time.

In a step they come one turn ahead and go back after their own, so at most `STREAM_WINDOW` are there: one
arrives, one is stepped, one leaves. Compiled graphs know where there is more room: in the backward they
*prefetch* units, whose records stay after their step until the next forward sends them back.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

import torch

from zero.optimizer.group_step import scratch_bytes
from zero.optimizer.stepped import SteppedSubGroup
from zero.optimizer.streamed_record import Residence, StreamedRecord
from zero.sharding.sharded_unit import ShardedUnit
from zero.sharding.sub_group import SubGroup
from zero.tiers.stores import Stores
from zero.tiers.tier import Opened

STREAM_WINDOW = 3


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
                self._enter(streamed)
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

    def _enter(self, streamed: StreamedRecord) -> None:
        """A record's turn to be stepped has come: if it is not on the device, it comes now and goes after
        the step."""
        if streamed.residence is Residence.ON_HOST:
            self._make_room()
            self._passing.append(streamed)

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
