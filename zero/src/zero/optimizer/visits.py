"""Records that come to the device for their step: which ones come when, and how many are there at one time.

In a step they come one turn ahead and go back after their own, so at most `WINDOW` are there: one arrives,
one is stepped, one leaves. Compiled graphs know where there is more room: in the backward they *bring* units,
whose records stay after their step until the next forward sends them back.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

import torch

from zero.gradients.group_gradients import GroupGradients
from zero.optimizer.group_step import scratch_bytes
from zero.optimizer.owned import OwnedSubGroup
from zero.optimizer.visitor import Visitor, Where
from zero.sharding.sharded_unit import ShardedUnit
from zero.sharding.sub_group import SubGroup
from zero.tiers.carrier import Carrier
from zero.tiers.record import Opened
from zero.tiers.stores import Stores

WINDOW = 3


class Visits:
    """The visitors among an optimizer's sub-groups; a follower of the gradients that they come for.

    show(owned): makes the optimizer's views those of the present record. expected: whether units may be
    brought, because a step follows.
    """

    def __init__(
        self, stores: Stores, owned: Sequence[OwnedSubGroup], show: Callable[[OwnedSubGroup], None]
    ) -> None:
        self.expected = False
        self._show = show
        visiting = [mine for mine in owned if mine.sub.visits]
        self._visitors: dict[SubGroup, Visitor] = {}
        self._passing: list[Visitor] = []  # those that came in this step, in order
        if visiting:
            outwards = Carrier(stores.accelerator)
            self._visitors = {mine.sub: Visitor(stores, mine, outwards) for mine in visiting}
        chunk = stores.accelerator.kernels.chunk
        self.scratch = max((scratch_bytes(mine.sub.numel, chunk) for mine in visiting), default=0)

    def __contains__(self, sub: SubGroup) -> bool:
        return sub in self._visitors

    def in_turn(self, subs: Sequence[OwnedSubGroup]) -> Generator[Opened, None, None]:
        """The record of each sub-group on the device, to be stepped. A record that was not brought goes back
        when the next one is asked for, and is back when the iterator is exhausted."""
        turns = [self._visitors[owned.sub] for owned in subs]
        try:
            for turn, visitor in enumerate(turns):
                self._enter(visitor)
                state = visitor.open()
                self._begin_next(turns[turn + 1 :])
                yield state
                self._leave(visitor)
        finally:
            self._clear()

    @property
    def passing_bytes(self) -> int:
        """The most bytes of the device that records take that come and go within a step."""
        return WINDOW * max((visitor.nbytes for visitor in self._visitors.values()), default=0)

    def nbytes(self, unit: ShardedUnit) -> int:
        """Bytes of the device that the records of a unit take while they are there."""
        return sum(visitor.nbytes for visitor in self._of(unit))

    def bring(self, unit: ShardedUnit) -> None:
        """Begin to copy a unit's records to the device, if a step follows and there is room."""
        for visitor in self._of(unit) if self.expected else ():
            if visitor.where is Where.HOME:
                self._try_to_come(visitor)

    def send(self, unit: ShardedUnit) -> None:
        """Begin to copy a unit's records back, if they have stayed."""
        for visitor in self._of(unit):
            if visitor.where is Where.NEAR:
                visitor.go()

    def land(self, unit: ShardedUnit) -> None:
        """Wait until a unit's records are back; those that have stayed go first."""
        self.send(unit)
        for visitor in self._of(unit):
            if visitor.where is Where.LEAVING:
                self._part_with(visitor)

    def part_with(self, sub: SubGroup) -> None:
        """Have the sub-group's record on the host again, if it is one that visits the device."""
        if sub in self:
            self._part_with(self._visitors[sub])

    def rest(self) -> None:
        """Have all records on the host again."""
        for visitor in self._visitors.values():
            self._part_with(visitor)

    def device_bytes(self) -> int:
        """Bytes of the device in use, besides the sub-groups' records."""
        here = (v for v in self._visitors.values() if v.where is not Where.HOME)
        return sum(visitor.nbytes for visitor in here if not visitor.shown)

    def arrived(self, gradients: GroupGradients) -> None:
        """A gradient has come: nothing to do before the step."""

    def dropped(self) -> None:
        """There will be no step with the gradients so far."""
        for visitor in self._visitors.values():
            if visitor.where in (Where.ARRIVING, Where.NEAR) and not visitor.shown:
                visitor.turn_back()

    def relieve(self, nbytes: int) -> int:
        """Send visitors that are not being stepped to the host, until `nbytes` are freed; returns the bytes
        freed."""
        freed = 0
        for visitor in self._visitors.values():
            waits = visitor.shown or visitor.where in (Where.ARRIVING, Where.LEAVING)
            if freed < nbytes and waits:
                freed += visitor.nbytes
                self._part_with(visitor)
        return freed

    def _of(self, unit: ShardedUnit) -> Iterator[Visitor]:
        subs = (sub for group in unit.groups for sub in group.subs)
        return (self._visitors[sub] for sub in subs if sub in self._visitors)

    def _enter(self, visitor: Visitor) -> None:
        """A visitor's turn to be stepped has come: if it is not on the device, it comes now and goes after
        the step."""
        if visitor.where is Where.HOME:
            self._make_room()
            self._passing.append(visitor)

    def _begin_next(self, following: Iterable[Visitor]) -> None:
        """Let the next visitor that is on the host come, if the window and the device have room."""
        visitor = next((v for v in following if v.where is Where.HOME), None)
        if visitor is not None and self._make_room() and self._try_to_come(visitor):
            self._passing.append(visitor)

    def _try_to_come(self, visitor: Visitor) -> bool:
        """Whether there was room. If not, the visitor comes on its turn, when others have gone."""
        try:
            visitor.come()
        except torch.OutOfMemoryError:
            return False
        return True

    def _leave(self, visitor: Visitor) -> None:
        """A visitor has been stepped: it goes if it came in this step, or if it may not stay."""
        if visitor not in self._passing and visitor.may_stay:
            visitor.stay()
            self._show(visitor.owned)
            return
        visitor.go()
        if visitor not in self._passing:
            self._passing.append(visitor)

    def _make_room(self) -> bool:
        """Wait for visitors that are leaving, oldest first; returns whether the window has room for one
        more."""
        while len(self._passing) >= WINDOW and self._passing[0].where is Where.LEAVING:
            self._part_with(self._passing[0])
        return len(self._passing) < WINDOW

    def _clear(self) -> None:
        """End a step, even one that failed: none that was passing is on the device any more."""
        while self._passing:
            self._part_with(self._passing[0])

    def _part_with(self, visitor: Visitor) -> None:
        """Have it on the host again: stepped if its step is over, otherwise as it was."""
        shown = visitor.shown
        if shown and visitor.where is Where.NEAR:
            visitor.go()
        if visitor.where is Where.LEAVING:
            visitor.land()
        elif visitor.where is not Where.HOME:
            visitor.turn_back()
        if visitor in self._passing:
            self._passing.remove(visitor)
        if shown:
            self._show(visitor.owned)
