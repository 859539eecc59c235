"""Log where a rank waits unusually long, well before the timeout makes an error of it.

The waits of a process's engines are looked at now and then. One that lasts is logged, together with the first
collective in which the ranks differ, or the ranks that do not wait. For that, ranks that wait long publish
their logs in the group's store; rank 0 reads those of all, and the others rank 0's. A failure that any rank
of the job has reported is logged at once: that rank may go on, and be of those with other data or layers.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import get_ident

from accelz.ranks.bounded_store import HostSilentError
from zero.communication.lookout import LONGEST, keep_looking
from zero.communication.reports import Log, Reports

_COLLECTIVE = "collective"  # so begins the place of a wait in one

logger = logging.getLogger("zero")


@dataclass(slots=True, eq=False)
class Wait:
    """A wait for other ranks that is under way.

    number: of the last collective issued. limit: seconds to an error; None for that of collectives.
    """

    number: int
    text: str
    limit: float | None
    began: float
    published: bool = False
    told: bool = False
    failure: bool = False
    """That of another rank has been told."""
    explained: bool = False

    @property
    def place(self) -> str:
        return self.text if self.limit else f"{_COLLECTIVE} {self.number}, {self.text}"


_Published = tuple[int, str, Log]  # by a rank: a wait's number; its place, "" once it is over; the log


class Waits:
    """The waits of the engines in one line. reports: what the ranks tell each other about it. seconds: of the
    host, in waits that are over.
    """

    def __init__(self, reports: Reports) -> None:
        group, alike = reports.group, reports.alike
        self._reports = reports
        self._group = group
        self._key = f"{reports.key}/waiting"
        self._read_from = alike if group.rank == alike[0] else alike[:1]
        self._waits: dict[int, Wait] = {}  # by thread
        self._seen: dict[int, _Published] = {}  # what was last read of other ranks
        self.patience = min(LONGEST, group.timeout / 4)
        self.seconds = 0.0
        if group.size > 1:
            keep_looking(self)

    @contextmanager
    def waiting(self, number: int, text: str, limit: float | None = None) -> Iterator[None]:
        """Wrap a wait; see `begin`."""
        wait = self.begin(number, text, limit)
        try:
            yield
        except BaseException:
            self.forget()
            raise
        self.over(wait)

    def begin(self, number: int, text: str, limit: float | None = None) -> Wait:
        """Note that this thread begins to wait for other ranks, until `over` or, after an error, `forget`.

        number, text: as in the log. limit: seconds to its error, for what is no collective; number is then
        that of the last one issued.
        """
        wait = self._waits[get_ident()] = Wait(number, text, limit, time.monotonic())
        return wait

    def over(self, wait: Wait) -> None:
        """Note that the wait has ended well."""
        self._waits.pop(get_ident(), None)
        self.seconds += time.monotonic() - wait.began
        if wait.published:
            with suppress(RuntimeError, OSError):
                self._publish(wait.number, "")

    def forget(self) -> None:
        """Note that the wait has ended with an error. The other ranks are still told where it was."""
        self._waits.pop(get_ident(), None)

    def places(self, ranks: Iterable[int], number: int) -> dict[int, str]:
        """In what calls other than collectives ranks wait, of those that have published it.

        number: of the collective that they are missed in. A rank that has waited elsewhere before that has
        gone on since.
        """
        return {
            rank: place
            for rank, place in self._elsewhere(ranks, number).items()
            if not place.startswith(_COLLECTIVE)
        }

    def describe(self, ranks: Iterable[int], number: int) -> str:
        """Say where ranks wait that are missed after collective `number`, as far as they have told."""
        return "; ".join(self._reports.waiting_in(self._elsewhere(ranks, number)))

    def _elsewhere(self, ranks: Iterable[int], number: int) -> dict[int, str]:
        with suppress(RuntimeError, OSError):  # the store's host is gone or silent: this is all there is
            self._read(ranks)
        found = {rank: self._seen[rank] for rank in ranks if rank in self._seen}
        return {rank: place for rank, (last, place, _) in found.items() if place and last >= number - 1}

    def look(self) -> None:
        """Publish and log what has lasted. Called by another thread."""
        for wait in tuple(self._waits.values()):
            seconds = time.monotonic() - wait.began
            if seconds < self.patience / 4 or wait.explained:
                continue
            try:
                if not wait.failure and (failure := self._reports.first_failure()):
                    wait.failure = wait.told = True
                    self._tell(wait, seconds, failure)
                if seconds >= self.patience:
                    self._look_at(wait, seconds)
            except HostSilentError as error:
                if not wait.told:
                    self._tell(wait, seconds, str(error))
                wait.told = True

    def _look_at(self, wait: Wait, seconds: float) -> None:
        if not wait.published:  # others have until the next look to do so
            wait.published = True
            self._publish(wait.number, wait.place)
            if not any(each is wait for each in tuple(self._waits.values())):  # over meanwhile
                self._publish(wait.number, "")
            return
        others = self._read(self._read_from)
        logs = {rank: log for rank, (_, _, log) in others.items()}
        found = self._reports.first_difference(logs)
        if found or not wait.told:
            self._tell(wait, seconds, found or self._company(wait, others))
        wait.told, wait.explained = True, bool(found)

    def _company(self, wait: Wait, others: Mapping[int, _Published]) -> str:
        """Say which ranks wait elsewhere or have not come."""
        apart = {
            rank: place
            for rank, (last, place, _) in others.items()
            if place not in ("", wait.place) and last >= wait.number - 1
        }
        come = [rank for rank, (number, _, _) in others.items() if number >= wait.number]
        absent = [r for r in self._read_from if r not in (*apart, *come)]
        told = self._reports.waiting_in(apart)
        if absent:
            told.append(f"rank(s) {self._reports.names(absent)} are not there yet")
        if told:
            return "; ".join(told)
        first = self._reports.alike[0]
        if first == self._group.rank:
            return "all ranks wait"
        return f"rank {self._reports.name(first)} waits, too"

    def _publish(self, number: int, place: str) -> None:
        said = json.dumps([number, place, list(self._reports.own_log().items())])
        self._reports.store.set(f"{self._key}/{self._group.rank}", said)

    def _read(self, ranks: Iterable[int]) -> dict[int, _Published]:
        """What ranks have published, by rank: where each waits or has waited, and its log."""
        found: dict[int, _Published] = {}
        store = self._reports.store
        for rank in ranks:
            if store.check([f"{self._key}/{rank}"]):
                number, place, log = json.loads(store.get(f"{self._key}/{rank}"))
                found[rank] = number, place, {int(n): str(text) for n, text in log}
        self._seen |= found
        return found

    def _tell(self, wait: Wait, seconds: float, what: str) -> None:
        limit, timeout = wait.limit or self._group.timeout, self._group.timeout
        logger.warning(
            "rank %s has waited %.0f s in %s: %s. It will fail after %.0f s%s",
            *(self._reports.name(self._group.rank), seconds, wait.place, what, limit),
            " (Config.timeout)" if limit == timeout else "",
        )
