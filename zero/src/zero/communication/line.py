"""What the engines on the same groups issue, one after another: it must be in one order on all ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Literal, get_args
from zlib import crc32

from accelz import Group
from accelz.ranks.exchange import unused_key
from zero.communication.failures import Failures
from zero.communication.reports import Issued, Reports
from zero.communication.waits import Waits
from zero.observe.flight_recorder import program_line

Kind = Literal["reductions", "others", "exchanges"]


class Line:
    """The collectives and exchanges since the newest engine on the groups was made.

    Every new engine begins a new line on all ranks, so that one can be made after others have failed.

    group: all ranks of the job. engine: the number of the newest, from 1. alike: the ranks whose engines must
    issue the same. key: the same on all ranks, and no other line's. name: says for messages which rank one
    is. count, issued: how many entries there were, and the last.
    """

    def __init__(self, group: Group, engine: int, alike: Sequence[int], name: Callable[[int], str]) -> None:
        self.key = unused_key(group, "zero/line")
        self.engine = engine
        self.count = 0
        reports = Reports(group, self.key, alike, name)
        self.issued = reports.issued
        self.waits = Waits(reports)
        self.failures = Failures(reports, self.waits, several=engine > 1)
        # The engine that issued last, and a hash of all turns; by kind, since a graph that is partly on the
        # host may run reductions or others sooner.
        self._turns: dict[Kind, tuple[int, int]] = dict.fromkeys(get_args(Kind), (0, 0))

    def enter(self, engine: int, kind: Kind, text: str, op: str, unit: str, nbytes: int) -> Issued:
        """Enter what an engine is about to issue. engine: its number. For the rest see `Collective`."""
        last, turns = self._turns[kind]
        if engine != last:
            self._turns[kind] = engine, crc32(f"{engine}".encode(), turns)
        self.count += 1
        at = None if self.failures.recorder is None else program_line(sys._getframe(1))
        issued = Issued(self.count, text, op, unit, nbytes, at)
        self.issued.append(issued)
        return issued

    @property
    def turns(self) -> list[int]:
        """Hashes of which engine has issued after which, by kind."""
        return [turns for _, turns in self._turns.values()]
