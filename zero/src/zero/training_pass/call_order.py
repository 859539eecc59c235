"""The order in which a backward comes to the calls of units: one for all ranks, whatever their graphs are.

Ranks call the same units in the same order, and autograd runs newest first, so the calls' backwards begin and
end in the reverse of the order in which the calls ended and began. A rank whose loss does not depend on some
call never comes to it: a condition that is dropped, features that are detached, a branch that is masked out.
It has to gather and reduce the unit nevertheless, in the same place, if any rank comes to it.

So each rank says, when autograd enters its graph, which calls that graph has. Nobody waits for the answer but
a rank that lacks a call, when its turn comes. At the end of the step's last backward all see whether they
have made the same calls.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from zero.communication.communicator import Communicator, NamedHandle
from zero.communication.differences import first_line
from zero.errors import RankMismatchError
from zero.sharding.sharded_unit import ShardedUnit
from zero.tiers.apart import apart
from zero.training_pass.call import Call, next_number

_LONGEST = 20_000  # beginnings and ends to remember: a program may never run a backward
_FLAGS = 512  # calls of which ranks tell each other are padded to a multiple, so that few sizes travel
_DIGEST = 4  # bytes
_GONE, _THERE, _TAKEN = range(3)  # what a rank says of a call: of several ranks' words, the highest holds


@dataclass(frozen=True, slots=True)
class Event:
    """number: of the graph's next node, at that time. over: whether the forward was over; else it began."""

    number: int
    call: Call
    over: bool


@dataclass
class _Ballot:
    """What all ranks say of the calls before a backward.

    flags: uint8, on the host: a digest of the calls, its complement, and for each call whether it is in the
    graph, or in any graph; of this rank or, once the handle has been waited for, of any. gone: the calls that
    are in no graph on any rank, once that is known.
    """

    calls: list[Call]
    flags: Tensor
    handle: NamedHandle
    equal: bool | None = None
    gone: frozenset[Call] = frozenset()


class CallOrder:
    """The calls whose backward may come, in the order in which it comes.

    task: autograd's, of the engine's backward under way; -1 in none.
    """

    def __init__(self, communicator: Communicator, units: Sequence[ShardedUnit]) -> None:
        self.task = -1
        self._communicator = communicator
        self._units = units
        self._events: deque[Event] = deque(maxlen=_LONGEST)
        self._left: list[Event] = []  # that the backward under way has left out, newest first
        self._ballot: _Ballot | None = None

    def enter(self, call: Call) -> None:
        """Note that a forward with gradients begins."""
        self._events.append(Event(call.start, call, over=False))

    def leave(self, call: Call) -> None:
        """Note that it is over."""
        self._events.append(Event(next_number(), call, over=True))

    def begin(self, task: int, root: Any) -> list[Call]:
        """Tell the other ranks which calls the graph has that autograd enters; return them all. Collective.

        root: the graph's first node.
        """
        self.settle()
        self.task = task
        self._left.clear()
        alone = self._communicator.group.size == 1
        current = [  # others can have no backward
            event
            for event in self._events
            if self.is_current(event.call) and (event.call.edges is not None or not alone)
        ]
        self._events = deque(current, maxlen=_LONGEST)
        calls = [event.call for event in current if not event.over]
        for call in calls:
            call.expect(task, root)
        if calls and not alone:
            with apart():
                flags = torch.frombuffer(self._told(calls), dtype=torch.uint8)
                handle = self._communicator.start_or("calls of units", flags)
            self._ballot = _Ballot(calls, flags, handle)
        return calls

    def is_current(self, call: Call) -> bool:
        """Return whether the weights are still those of the forward."""
        return call.changes == self._units[call.index].changes

    def _told(self, calls: list[Call]) -> bytearray:
        numbers = array("q", [2 * event.call.index + event.over for event in self._events])
        digest = crc32(numbers.tobytes()).to_bytes(_DIGEST, "little")
        complement = bytes(255 - byte for byte in digest)
        words = bytes(_TAKEN if c.taken else _THERE if c.edges is not None else _GONE for c in calls)
        return bytearray(digest + complement + words + bytes(-len(calls) % _FLAGS))

    def pop_past(self, number: int) -> Event | None:
        """Take out the newest event that autograd is past, as it runs a node of this number; None if there is
        none. Calls that the backward does not go through are left out."""
        while self._events and self._events[-1].number > number:
            event = self._events.pop()
            if self.takes(event.call):
                return event
            self._left.append(event)
        return None

    def takes(self, call: Call) -> bool:
        """Return whether the backward goes through the call on any rank. Waits if it does not on this one."""
        if not call.taken:
            self._read()
        return call.taken

    def _read(self) -> None:
        ballot = self._ballot
        if ballot is None or ballot.equal is not None:
            return
        ballot.handle.wait()
        with apart():
            told = ballot.flags.tolist()
        digest, complement, flags = told[:_DIGEST], told[_DIGEST : 2 * _DIGEST], told[2 * _DIGEST :]
        ballot.equal = all(byte == 255 - other for byte, other in zip(digest, complement, strict=True))
        if ballot.equal:  # else there are no calls that all ranks know by number; `settle` says so
            said = list(zip(ballot.calls, flags, strict=False))
            for call, flag in said:
                call.taken |= flag == _TAKEN
            ballot.gone = frozenset(call for call, flag in said if flag == _GONE)

    def left_out(self) -> set[Call]:
        """Calls that the backward under way has gone past and not through, on any rank."""
        return {event.call for event in self._left}

    def end(self) -> None:
        """The backward is over. Calls that were left out may have another one."""
        self._events.extend(reversed(self._left))
        self._left.clear()
        self.task = -1

    def settle(self) -> None:
        """Raise RankMismatchError on all ranks if they had made different calls before the last backward.

        Forgets calls that no rank has a graph of, such as those of frozen modules: there would be more of
        them with every step.
        """
        self._read()
        ballot, self._ballot = self._ballot, None
        if ballot is None:
            return
        if ballot.gone:
            left = [event for event in self._events if event.call not in ballot.gone]
            self._events = deque(left, maxlen=_LONGEST)
        if not ballot.equal:
            every = self._communicator.all_gather_object(
                [f"call {number} is of {call.unit!r}" for number, call in enumerate(ballot.calls, 1)]
            )
            shown = first_line(every, self._communicator.name)
            raise RankMismatchError(f"the ranks have called different units: {shown}. {_ADVICE}")

    def clear(self) -> None:
        """Forget everything, after an exception."""
        self.task = -1
        self._events.clear()
        self._left.clear()
        self._ballot = None


_ADVICE = (
    "Every rank must call the same units, as often and in the same order; its loss need not depend on them "
    "all. Give all ranks equally many chunks; if a mixture's experts are units, name the block around them "
    "with Config(units=...)"
)
