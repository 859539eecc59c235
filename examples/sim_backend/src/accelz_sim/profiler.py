"""The simulated device's profiler: it keeps the ranges that a program shows it while it is attached.

with profiler.attached() as events:
    train()
# [Event("begin", "zero::gather layers.0", thread, seconds), Event("end", ...), ...]
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple


class Event(NamedTuple):
    """The begin or end of a range. thread: its identifier. at: seconds of time.perf_counter."""

    kind: Literal["begin", "end"]
    name: str
    thread: int
    at: float


_events: list[Event] | None = None


@contextmanager
def attached() -> Iterator[list[Event]]:
    """Keep this process's ranges, in the block, in the order of their times."""
    global _events
    events: list[Event] = []
    _events = events
    try:
        yield events
    finally:
        _events = None


@contextmanager
def ranged(name: str) -> Iterator[None]:
    """Show the block as a range."""
    _note("begin", name)
    try:
        yield
    finally:
        _note("end", name)


def _note(kind: Literal["begin", "end"], name: str) -> None:
    events = _events
    if events is not None:
        events.append(Event(kind, name, threading.get_ident(), time.perf_counter()))
