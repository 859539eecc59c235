"""Records that come to the device for their step: who comes when, and how many are there at one time.

In a step they come one ahead of their turn and go back behind it, so at most `WINDOW` are there: one arrives,
one is stepped, one leaves.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence

import torch

from zero.flat_group import FlatGroup
from zero.group_gradients import GroupGradients
from zero.owned import OwnedGroup
from zero.tiers.carrier import Carrier
from zero.tiers.record import Opened
from zero.tiers.stores import Stores
from zero.visitor import Visitor, Where

WINDOW = 3


class Visits:
    """The visitors among an optimizer's groups; a follower of the gradients that they come for."""

    def __init__(self, stores: Stores, owned: Mapping[FlatGroup, OwnedGroup]) -> None:
        visiting = {group: mine for group, mine in owned.items() if group.placement.visits}
        self._visitors: dict[FlatGroup, Visitor] = {}
        self._passing: list[Visitor] = []  # that came in this step, in their order
        if visiting:
            outwards = Carrier(stores.accelerator)
            self._visitors = {g: Visitor(stores, mine, outwards) for g, mine in visiting.items()}
            stores.relieve = self.relieve

    def __contains__(self, group: FlatGroup) -> bool:
        return group in self._visitors

    def in_turn(self, groups: Sequence[FlatGroup]) -> Generator[Opened, None, None]:
        """Each group's record on the device, to be stepped; it goes back when the next one is asked for.

        All are back when the iterator is exhausted.
        """
        turns = [self._visitors[group] for group in groups]
        try:
            for turn, visitor in enumerate(turns):
                self._enter(visitor)
                state = visitor.open()
                self._begin_next(turns[turn + 1 :])
                yield state
                visitor.go()
        finally:
            self._clear()

    def device_bytes(self) -> int:
        """Bytes of the device in use."""
        return sum(v.nbytes for v in self._visitors.values() if v.where is not Where.HOME)

    def arrived(self, gradients: GroupGradients) -> None:
        """A gradient is there: nothing to do before the step."""

    def dropped(self) -> None:
        """There will be no step of the gradients so far."""
        self._turn_back(self._visitors.values())

    def relieve(self, nbytes: int) -> int:
        """Let those go whose turn it is not, until `nbytes` are free; returns how many are."""
        freed = 0
        for visitor in self._visitors.values():
            if freed < nbytes and visitor.where in (Where.ARRIVING, Where.LEAVING):
                freed += visitor.nbytes
                self._part_with(visitor)
        return freed

    def _enter(self, visitor: Visitor) -> None:
        """Its turn has come: if it has not been brought, make it one of those that pass."""
        if visitor.where is Where.HOME:
            self._make_room()
            self._passing.append(visitor)

    def _begin_next(self, following: Iterable[Visitor]) -> None:
        """Let the next one come that is not there, as far as the window and the device have room."""
        visitor = next((v for v in following if v.where is Where.HOME), None)
        if visitor is None or not self._make_room():
            return
        try:
            visitor.come()
        except torch.OutOfMemoryError:
            return  # it will come on its turn, when others have gone
        self._passing.append(visitor)

    def _make_room(self) -> bool:
        """Wait for those that leave, the oldest first; returns whether there is room for one more."""
        while len(self._passing) >= WINDOW and self._passing[0].where is Where.LEAVING:
            self._part_with(self._passing[0])
        return len(self._passing) < WINDOW

    def _clear(self) -> None:
        """End a step, also one that failed: nobody who passes is there any more."""
        while self._passing:
            self._part_with(self._passing[0])

    def _part_with(self, visitor: Visitor) -> None:
        if visitor.where is Where.LEAVING:
            visitor.land()
        elif visitor.where is not Where.HOME:
            visitor.turn_back()
        if visitor in self._passing:
            self._passing.remove(visitor)

    def _turn_back(self, visitors: Iterable[Visitor]) -> None:
        for visitor in visitors:
            if visitor.where is Where.ARRIVING:
                visitor.turn_back()
