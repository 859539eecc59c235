"""Log where a rank waits unusually long, well before the timeout makes an error of it.

A thread of the process looks at the waits of its engines. One that lasts is logged, together with the first
collective in which the ranks differ, or the ranks that do not wait. For that, ranks that wait long publish
their logs in the group's store; rank 0 reads those of all, and the others rank 0's.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Event, Lock, Thread, get_ident
from weakref import WeakSet

from accelz.collectives import Group
from zero.communication.reports import Log, difference, names

LONGEST = 60.0
"""Seconds after which a wait is published; a quarter of the timeout, if that is less."""

logger = logging.getLogger("zero")


@dataclass
class _Wait:
    number: int
    text: str
    began: float
    published: bool = False
    told: bool = False
    explained: bool = False


class Watch:
    """The waits of one engine. key: the engine's key in the store. log: its last collectives."""

    def __init__(self, group: Group, key: str, log: Iterable[tuple[int, str]]) -> None:
        self._group = group
        self._key = f"{key}/waiting"
        self._log = log
        self._read_from = range(group.size if group.rank == 0 else 1)
        self._waits: dict[int, _Wait] = {}  # by thread
        self.patience = min(LONGEST, group.timeout / 4)
        if group.size > 1:
            _watch(self)

    @contextmanager
    def waiting(self, number: int, text: str) -> Iterator[None]:
        """Wrap a wait for other ranks. number, text: as in the log."""
        thread = get_ident()
        self._waits[thread] = _Wait(number, text, time.monotonic())
        try:
            yield
        finally:
            self._waits.pop(thread, None)

    def look(self) -> None:
        """Publish and log what has lasted. Called every quarter of `patience`, by another thread."""
        for wait in tuple(self._waits.values()):
            seconds = time.monotonic() - wait.began
            if seconds < self.patience or wait.explained:
                continue
            if not wait.published:  # others have until the next look to do so
                wait.published = True
                self._publish(wait)
                continue
            others = self._read()
            logs = {rank: log for rank, (_, log) in others.items()}
            found = difference(self._group.rank, dict(self._log), logs)
            absent = [rank for rank in self._read_from if others.get(rank, (-1, {}))[0] < wait.number]
            if found or not wait.told:
                there = "all ranks wait" if self._group.rank == 0 else "rank 0 waits, too"
                missing = f"rank(s) {names(absent)} are not there yet" if absent else there
                self._tell(wait, seconds, found or missing)
            wait.told, wait.explained = True, bool(found)

    def _publish(self, wait: _Wait) -> None:
        said = json.dumps([wait.number, list(dict(self._log).items())])
        self._group.store.set(f"{self._key}/{self._group.rank}", said)

    def _read(self) -> dict[int, tuple[int, Log]]:
        """What ranks have published, by rank: where each waits or has waited, and its log."""
        found: dict[int, tuple[int, Log]] = {}
        for rank in self._read_from:
            if self._group.store.check([f"{self._key}/{rank}"]):
                number, log = json.loads(self._group.store.get(f"{self._key}/{rank}"))
                found[rank] = number, {int(n): str(text) for n, text in log}
        return found

    def _tell(self, wait: _Wait, seconds: float, what: str) -> None:
        logger.warning(
            "rank %d has waited %.0f s in collective %d, %s: %s. It will fail after %.0f s (Config.timeout)",
            *(self._group.rank, seconds, wait.number, wait.text, what, self._group.timeout),
        )


_watches: WeakSet[Watch] = WeakSet()
_lock = Lock()
_changed = Event()
_threads: list[Thread] = []


def _watch(watch: Watch) -> None:
    with _lock:
        _watches.add(watch)
        if not _threads:
            _threads.append(Thread(target=_serve, name="zero watch", daemon=True))
            _threads[0].start()
    _changed.set()


def _serve() -> None:
    while True:
        with _lock:
            patience = min((watch.patience for watch in _watches), default=LONGEST)
        _changed.wait(patience / 4)
        _changed.clear()
        with _lock:
            watches = list(_watches)
        while watches:
            with suppress(RuntimeError, OSError):  # the store's host is gone: the wait itself will fail
                watches.pop().look()
