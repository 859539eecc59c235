"""Raise what explains a collective that failed, or collectives that differ between the ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NoReturn

from torch.distributed import get_process_group_ranks

from accelz import CollectiveError, Group
from zero.communication.reports import Failure, Issued, Reports
from zero.communication.waits import Waits
from zero.errors import CommunicationError, RankMismatchError
from zero.observe.flight_recorder import FlightRecorder


class Failures:
    """Failures of collectives that were issued in one line. reports: what the ranks tell each other about it.

    several: whether there are several engines in it. first: what failed first; "" while nothing has. Nothing
    can be exchanged after that. notes: of what has happened on this rank, perhaps on it alone, for errors to
    tell. recorder: told of failures.
    """

    def __init__(self, reports: Reports, waits: Waits, several: bool) -> None:
        self.first = ""
        self.recorder: FlightRecorder | None = None
        self.notes = reports.notes
        self._reports = reports
        self._group = reports.group
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
        among = self._among(ranks)
        reports = self._reports.exchange(failure, among)
        difference = self._reports.difference(reports)
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
        return self._reports.difference(self._reports.exchange())


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
