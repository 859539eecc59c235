"""Raise what explains a collective that failed, or collectives that differ between the ranks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from torch.distributed import get_process_group_ranks

from accelz import CollectiveError, Group
from zero.communication.reports import Failure, Reports
from zero.communication.waits import Waits
from zero.errors import CommunicationError, RankMismatchError
from zero.observe.flight_file import Collective
from zero.observe.flight_recorder import FlightRecorder, Line, described


@dataclass(slots=True, eq=False)
class Issued:
    """A collective, or an exchange in host memory. number: from 1. began: on the monotonic clock. at: the
    program's line, where a flight recorder wants it. For the rest see `Collective`."""

    number: int
    text: str
    op: str
    unit: str
    nbytes: int
    at: Line | None = None
    state: str = "beginning"
    began: float = field(default_factory=time.monotonic)

    def described(self) -> Collective:
        at = described(self.at) if self.at else ""
        seconds = time.monotonic() - self.began
        return Collective(self.number, self.text, self.op, self.unit, self.nbytes, self.state, seconds, at)


class Recent:
    """The last of what was issued. Iteration gives numbers and texts."""

    def __init__(self, length: int) -> None:
        self.entries: deque[Issued] = deque(maxlen=length)

    def __iter__(self) -> Iterator[tuple[int, str]]:
        return ((each.number, each.text) for each in tuple(self.entries))  # others may append meanwhile

    def described(self) -> list[Collective]:
        return [each.described() for each in tuple(self.entries)]


class Failures:
    """Failures of collectives that were issued in one line. reports: what the ranks tell each other about it.

    log: number and text of the last. several: whether there are several engines in it. first: what failed
    first; "" while nothing has. Nothing can be exchanged after that. notes: of what has happened on this
    rank, perhaps on it alone, for errors to tell. recorder: told of failures.
    """

    def __init__(self, reports: Reports, log: Iterable[tuple[int, str]], waits: Waits, several: bool) -> None:
        self.first = ""
        self.recorder: FlightRecorder | None = None
        self.notes = reports.notes
        self._reports = reports
        self._group = reports.group
        self._log = log
        self._waits = waits
        self._advice = f"{_ADVICE}. {_ENGINES}" if several else _ADVICE

    def check(self) -> None:
        """Raise CommunicationError if a collective has failed before."""
        if self.first:
            raise CommunicationError(
                f"no collective is possible after an earlier failure: {self.first}. Start a new job from the "
                "last checkpoint"
            )

    def explain(self, error: CollectiveError, issued: Issued, ranks: Group) -> NoReturn:
        """Raise what the ranks' reports say of a collective over `ranks` that failed."""
        self._waits.forget()
        issued.state = "failed"
        cause = " ".join(str(error).split()) + self._numbers(ranks)
        self._record(cause)
        self.first = self.first or cause
        failure = Failure(issued.number, issued.text, time.monotonic() - issued.began, cause)
        log = dict(self._log)
        among = self._among(ranks)
        reports = self._reports.exchange(log, failure, among)
        difference = self._reports.difference(log, reports)
        if difference:
            raise RankMismatchError(f"{difference}. {self._advice}") from error
        silent = [rank for rank in among if rank not in reports]
        places = self._waits.places(silent, failure.number)
        raise CommunicationError(self._reports.describe(failure, reports, places, among)) from error

    def aborted(self, error: CollectiveError) -> NoReturn:
        """Raise for a collective that the library has aborted; it may have been any of the last."""
        self._record(str(error))
        difference = "" if self.first else self._difference()
        self.first = self.first or str(error)
        if difference:  # libraries abort, too, where ranks meet in collectives of different sizes
            raise RankMismatchError(f"{difference}. {self._advice}") from error
        rank = self._reports.name(self._group.rank)
        raise CommunicationError(f"rank {rank}: {error}. {_WORTHLESS}") from error

    def mismatch(self) -> NoReturn:
        """Raise for ranks whose hashes differ."""
        self.first = "the ranks issued different collectives"
        self._record(self.first)
        raise RankMismatchError(f"{self._difference() or self.first}. {self._advice}")

    def _record(self, why: str) -> None:
        if self.recorder is not None:
            self.recorder.failed(why)

    def _among(self, ranks: Group) -> Sequence[int]:
        """The ranks to ask about a collective over `ranks`: those that issue the same, or, where some of its
        members do not, its members."""
        members = self._members(ranks)
        alike = self._reports.alike
        return alike if set(members) <= set(alike) else members

    def _members(self, ranks: Group) -> Sequence[int]:
        """A group's members by their numbers in the job."""
        if ranks.size == self._group.size:
            return range(ranks.size)
        job, members = (get_process_group_ranks(g.process_group) for g in (self._group, ranks))
        return [job.index(rank) for rank in members]

    def _numbers(self, ranks: Group) -> str:
        """Translate a group's rank numbers to the job's, for errors; "" if they are the same."""
        if ranks.size == self._group.size:
            return ""
        numbers = self._reports.names(self._members(ranks))
        return f" (ranks 0 to {ranks.size - 1} of this group are ranks {numbers} of the job)"

    def _difference(self) -> str:
        """Say where the ranks' collectives diverge; "" if they agree."""
        log = dict(self._log)
        return self._reports.difference(log, self._reports.exchange(log))


_WORTHLESS = (
    "Everything computed since then is invalid on all ranks, possibly including the last optimizer step: "
    "check the ranks' logs for the one that failed first, and start a new job from the last checkpoint"
)
_ADVICE = (
    "Every rank must run the same modules in the same order; a branch that depends on the rank's data is "
    "the usual cause. If a mixture's experts are units, name the block around them with Config(units=...)"
)
_ENGINES = (
    "Engines must take the same turns on all ranks, too, with as many forwards, steps and whole values each"
)
