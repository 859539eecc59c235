"""What is queued beside the computation: who waits for what, also where queueing fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from zero.tiers.carrier import Carrier


class Queue:
    """A stream that writes down what it waits for; its events are its name and how many it has recorded."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.waited: list[tuple[str, int]] = []
        self._recorded = 0

    def record(self) -> tuple[str, int]:
        self._recorded += 1
        return self.name, self._recorded

    def wait(self, event: tuple[str, int]) -> None:
        self.waited.append(event)


class Queues:
    def __init__(self) -> None:
        self.computing = Queue("computing")
        self.made: list[Queue] = []
        self._current = self.computing

    def current(self) -> Queue:
        return self._current

    def new(self) -> Queue:
        self.made.append(Queue(f"side {len(self.made)}"))
        return self.made[-1]

    @contextmanager
    def use(self, queue: Queue) -> Iterator[None]:
        before, self._current = self._current, queue
        try:
            yield
        finally:
            self._current = before


@pytest.fixture
def queues() -> Queues:
    return Queues()


@pytest.fixture
def carrier(queues: Queues) -> Carrier:
    accelerator: Any = SimpleNamespace(streams=queues)
    return Carrier(accelerator)


def test_only_who_waits_for_the_journey_waits(queues: Queues, carrier: Carrier) -> None:
    with carrier.beside() as work:
        beside = queues.current()
    assert beside is not queues.computing
    assert beside.waited == [("computing", 1)]
    assert queues.current() is queues.computing
    assert queues.computing.waited == []
    work.wait()
    assert queues.computing.waited == [(beside.name, 1)]


def test_after_an_error_the_computation_waits(queues: Queues, carrier: Carrier) -> None:
    """What was queued before it may write to memory that is given back now."""

    def fail() -> None:
        with carrier.beside():
            raise MemoryError

    with pytest.raises(MemoryError):
        fail()
    assert queues.current() is queues.computing
    assert queues.computing.waited == [(queues.made[-1].name, 1)]


def test_what_nobody_sends_beside_takes_no_stream(queues: Queues, carrier: Carrier) -> None:
    assert len(queues.made) == 1
    for _ in range(2):
        with carrier.beside():
            pass
    assert len(queues.made) == 2
