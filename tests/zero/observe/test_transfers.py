"""What rates are made of: collectives and copies that were waited for, from when they could begin."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from accelz import Event
from zero.observe.transfers import Transfer, rates

pytestmark = pytest.mark.host


@dataclass
class At(Event):
    """A point in time."""

    seconds: float

    def done(self) -> bool:
        return True

    def synchronize(self) -> None:
        return

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, At)
        return self.seconds - earlier.seconds


def transfer(kind: str, nbytes: int, *marks: float) -> Transfer:
    return Transfer(kind, nbytes, [At(mark) for mark in marks])


def test_rates_are_of_what_was_waited_for() -> None:
    hidden = transfer("all_gather", 900, 0.0, 0.0, 5.0, 5.00001)  # was over at some time before 5
    waited = transfer("all_gather", 100, 1.0, 1.0, 1.5, 3.0)
    queued = transfer("all_gather", 100, 2.0, 2.0, 3.5, 4.0)  # behind the one before
    at_once = transfer("reduce_scatter", 50, 1.0, 1.5, 9.0, 9.0)  # its call returned when it was over
    copy = transfer("to host", 30, 1.0, 4.0)
    under_way = transfer("to device", 30, 1.0)
    assert rates([hidden, waited, queued, at_once, copy, under_way]) == {
        "all_gather": 200 / 3,
        "reduce_scatter": 100,
        "to host": 10,
    }
