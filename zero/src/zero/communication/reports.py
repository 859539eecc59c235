"""What ranks report to each other when a collective has failed, and the text of the error.

Reports go through the group's store, which works while collectives hang, unless its host hangs, too. They are
numbered in order of
arrival, so that all ranks agree on whose collective failed first.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from accelz import Group
from accelz.ranks.bounded_store import BoundedStore, HostSilentError
from zero.observe.flight_file import Collective
from zero.observe.flight_recorder import Line, described

SECONDS = 5.0  # how long a rank waits for the others' reports, or for the store itself

LOG_LENGTH = 256  # collectives that a rank can tell of

Log = Mapping[int, str]  # a rank's last collectives, by number
Notes = Mapping[str, str]
"""What has happened on a rank, perhaps on it alone, for the whole job to be told; by what it is about."""


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


@dataclass(frozen=True)
class Failure:
    """A collective that failed. number, text: as in the log. seconds: since it was issued."""

    number: int
    text: str
    seconds: float
    cause: str

    def __str__(self) -> str:
        return f"after {self.seconds:.1f} s: {self.cause}"


@dataclass(frozen=True)
class Report:
    """One rank's report.

    turn: its place in the order of reports, from 1. failure: None if the rank only found that the ranks'
    collectives differ. notes: see `Notes`.
    """

    turn: int
    log: Log
    failure: Failure | None
    notes: Notes = field(default_factory=dict)


class Reports:
    """What the ranks of a group tell each other about the line of collectives that they issue.

    key: the line's key in the store. alike: the ranks that must issue the same (None: all). name: says for
    messages which rank one is. issued: by this rank, the last LOG_LENGTH. notes: of this rank. silence: why
    there are no reports, where the store's host does not answer.
    """

    def __init__(
        self, group: Group, key: str, alike: Sequence[int] | None = None, name: Callable[[int], str] = str
    ) -> None:
        self.group = group
        self.key = key
        self.alike = range(group.size) if alike is None else alike
        self.name = name
        self.issued: deque[Issued] = deque(maxlen=LOG_LENGTH)
        self.notes: dict[str, str] = {}
        self.silence = ""
        self._published = False

    @property
    def store(self) -> BoundedStore:
        """For what explains a wait and must not become another one."""
        return hurried(self.group)

    def own_log(self) -> dict[int, str]:
        """What this rank has issued last, by number."""
        return {each.number: each.text for each in tuple(self.issued)}  # others may append meanwhile

    def exchange(
        self, failure: Failure | None = None, among: Sequence[int] | None = None
    ) -> dict[int, Report]:
        """Publish this rank's report if it has not; return the reports of all that answer in time.

        among: the ranks to wait for; None: those that are alike.
        """
        reports: dict[int, Report] = {}
        store = self.store
        deadline = time.monotonic() + store.seconds
        try:
            self._publish(store, failure)
            waiting = set(self.alike if among is None else among)
            while waiting and time.monotonic() < deadline:
                for rank in sorted(waiting):
                    if store.check([f"{self.key}/{rank}"]):
                        reports[rank] = _parse(store.get(f"{self.key}/{rank}"))
                        waiting.discard(rank)
                time.sleep(0.02)
        except HostSilentError as error:
            self.silence = str(error)
        except (RuntimeError, OSError):  # the store's host is gone: use the reports received so far
            pass
        return reports

    def difference(self, reports: Mapping[int, Report]) -> str:
        """Say where this rank's sequence and another's diverge; "" if they agree as far as both go."""
        logs = {rank: report.log for rank, report in reports.items() if rank in self.alike}
        found = self.first_difference(logs)
        return ". ".join([found, *self._noted(reports)]) if found else ""

    def first_difference(self, others: Mapping[int, Log]) -> str:
        """Say where this rank's sequence and another's diverge; "" if they agree. others: logs by rank."""
        log = self.own_log()
        for other, theirs in sorted(others.items()):
            for number, text in theirs.items():
                if log.get(number, text) != text:
                    return (
                        f"ranks issued different collectives: number {number} is {log[number]} on rank "
                        f"{self.name(self.group.rank)}, but {text} on rank {self.name(other)}"
                    )
        return ""

    def first_failure(self) -> str:
        """What the first report says, whichever rank's it is; "" while there is none."""
        store = self.store
        if not store.check([f"{self.key}/first"]):
            return ""
        rank = int(store.get(f"{self.key}/first"))
        failure = _parse(store.get(f"{self.key}/{rank}")).failure
        if failure is None:
            return f"rank {self.name(rank)} has failed: the ranks' collectives differ"
        return f"rank {self.name(rank)} has failed: collective {failure.number}, {failure.text}, {failure}"

    def describe(
        self,
        mine: Failure,
        reports: Mapping[int, Report],
        places: Mapping[int, str],
        among: Sequence[int] | None = None,
    ) -> str:
        """Say where a collective failed first and why, and who did not answer, as far as that is known.

        places: the call, not a collective, in which a rank that has not reported waits, if it published that.
        among: the ranks that take part in the collective; None: those that are alike.
        """
        here = f"rank {self.name(self.group.rank)}: collective {mine.number}, {mine.text}, failed"
        origin = self._origin(mine, reports)
        if origin is None and not self._timed_out(mine):
            here += " on this rank first,"
        parts = [f"{here} {mine}"]
        if origin is not None:
            rank, first = origin
            parts.append(
                f"It failed on rank {self.name(rank)} first: collective {first.number}, {first.text}, {first}"
            )
        parts += self._absence(mine, reports, places, self.alike if among is None else among)
        if len(parts) == 1 and self._timed_out(mine):
            parts.append("All ranks had reached it: check the connections between them")
        parts += self._noted(reports)
        return ". ".join(parts)

    def _publish(self, store: BoundedStore, failure: Failure | None) -> None:
        if not self._published:
            self._published = True
            turn = store.add(f"{self.key}/reports", 1)
            report = [turn, list(self.own_log().items()), failure and asdict(failure), self.notes]
            store.set(f"{self.key}/{self.group.rank}", json.dumps(report))
            if turn == 1:
                store.set(f"{self.key}/first", str(self.group.rank))

    def _origin(self, mine: Failure, reports: Mapping[int, Report]) -> tuple[int, Failure] | None:
        """Return the rank that failed first and its failure, if it is another and tells more than `mine`.

        Immediate failures come before those by timeout; among the latter, the one with the lowest number is
        first.
        """
        found = [(r, report.turn, report.failure) for r, report in reports.items() if report.failure]
        if not found:
            return None
        rank, _, first = min(found, key=lambda f: self._precedence(f[2], f[1]))
        alike = self._timed_out(first) and first.number == mine.number
        return None if rank == self.group.rank or alike else (rank, first)

    def _precedence(self, failure: Failure, turn: int) -> tuple[bool, int, int]:
        late = self._timed_out(failure)
        return late, failure.number if late else 0, turn

    def _timed_out(self, failure: Failure) -> bool:
        return failure.seconds >= self.group.timeout

    def _absence(
        self, mine: Failure, reports: Mapping[int, Report], places: Mapping[int, str], among: Sequence[int]
    ) -> list[str]:
        """Return sentences about ranks that were missing; empty if none."""
        if self.silence:
            return [f"Nothing is known of the other ranks: {self.silence}"]
        others = [r for r in among if r != self.group.rank]
        silent = [r for r in others if r not in reports and r not in places]
        behind = [
            r
            for r in others
            if r in self.alike and r in reports and max(reports[r].log, default=0) < mine.number
        ]
        told = (
            [f"{'; '.join(self.waiting_in(places))}: every rank must make the same calls"] if places else []
        )
        if silent and self._timed_out(mine):
            told.append(
                f"rank(s) {self.names(silent)} did not answer (dead, or busy outside the engine): look at "
                f"the output of rank {self.name(silent[0])} first"
            )
        elif silent:
            limit = f"until the timeout of {self.group.timeout:.0f} s"
            told.append(f"rank(s) {self.names(silent)} did not answer (dead, or waiting for others {limit})")
        elif behind:
            told.append(f"rank(s) {self.names(behind)} had not reached it")
        return told

    def _noted(self, reports: Mapping[int, Report]) -> list[str]:
        """Return sentences about what some ranks have noted and others have not."""
        every = {rank: report.notes for rank, report in reports.items() if rank in self.alike}
        return [
            f"On rank(s) {self.names(ranks)}, {what}"
            for ranks, what in not_everywhere(every, len(self.alike))
        ]

    def waiting_in(self, places: Mapping[int, str]) -> list[str]:
        """Say for each place which ranks wait there. places: by rank."""
        at = {place: [r for r, other in places.items() if other == place] for place in places.values()}
        return [f"rank(s) {self.names(ranks)} wait in {place}" for place, ranks in at.items()]

    def names(self, ranks: Sequence[int]) -> str:
        return ", ".join(map(self.name, ranks))


def hurried(group: Group) -> BoundedStore:
    """The group's store, for what explains a wait and must not become another one."""
    return group.store.within(min(SECONDS, group.timeout))


def not_everywhere(every: Mapping[int, Notes], size: int) -> list[tuple[list[int], str]]:
    """Return what some of the ranks have noted, and which ranks: one text for each thing noted.

    every: of those that are known, by rank. size: how many ranks there are.
    """
    found = []
    for about in dict.fromkeys(about for notes in every.values() for about in notes):
        ranks = [rank for rank, notes in every.items() if about in notes]
        if len(ranks) < size:
            found.append((ranks, every[ranks[0]][about]))
    return found


def _parse(text: str | bytes) -> Report:
    turn, log, failure, notes = json.loads(text)
    named = {int(number): str(said) for number, said in log}
    return Report(turn, named, failure and Failure(**failure), notes)
