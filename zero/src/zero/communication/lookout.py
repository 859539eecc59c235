"""A thread of the process that looks, now and then, at what may go wrong while ranks train or wait."""

from __future__ import annotations

from contextlib import suppress
from threading import Event, Lock, Thread
from typing import Protocol
from weakref import WeakSet

LONGEST = 60.0
"""Seconds after which a wait is published, if a quarter of the timeout is not less."""


class Looking(Protocol):
    """patience: seconds, in a quarter of which it is looked at. look: may raise RuntimeError or OSError."""

    patience: float

    def look(self) -> None: ...


def keep_looking(at: Looking) -> None:
    """Call `at.look()` as long as it is there, which this does not keep it."""
    with _lock:
        _looked_at.add(at)
        if not _threads:
            _threads.append(Thread(target=_serve, name="zero watch", daemon=True))
            _threads[0].start()
    _changed.set()


_looked_at: WeakSet[Looking] = WeakSet()
_lock = Lock()
_changed = Event()
_threads: list[Thread] = []


def _serve() -> None:
    while True:
        with _lock:
            patience = min((each.patience for each in _looked_at), default=LONGEST)
        _changed.wait(patience / 4)
        _changed.clear()
        with _lock:
            every = list(_looked_at)
        while every:
            with suppress(RuntimeError, OSError):  # the store's host is gone: waits themselves will fail
                every.pop().look()
