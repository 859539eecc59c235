"""What is gathered ahead when the model takes another path than the last time."""

from __future__ import annotations

from typing import Any, cast

from zero.sharding.gather_format import EXACT
from zero.sharding.sharded_unit import ShardedUnit
from zero.training_pass.schedule import Schedule

UNITS = 16


class Unit:
    """Counts how often it had to be gathered when it was needed, and how often that had begun ahead."""

    resident = False

    def __init__(self, index: int) -> None:
        self.index = index
        self.gathered = False
        self.on_demand = self.ahead = 0

    def gather(self, _: object) -> None:
        self.on_demand += not self.gathered
        self.ahead += self.gathered
        self.gathered = False  # it is released after each use

    def start_gather(self, _: object) -> None:
        self.gathered = True


def counts(*paths: list[int]) -> tuple[int, int]:
    """Units on demand and ahead in the last of these steps."""
    units = [Unit(index) for index in range(UNITS)]
    schedule = Schedule(cast(list[ShardedUnit], units), ahead=1, disk=None)
    for path in paths:
        schedule.begin(training=True)
        for unit in units:
            unit.gathered, unit.on_demand, unit.ahead = False, 0, 0
        for index in path:
            units[index].gather(EXACT)
            schedule.follow(cast(Any, units[index]), EXACT)
    return sum(unit.on_demand for unit in units), sum(unit.ahead for unit in units)


FORWARD = list(range(UNITS))
USUAL = FORWARD + FORWARD[::-1]


def test_the_usual_path_is_gathered_ahead() -> None:
    assert counts(USUAL, USUAL) == (1, 2 * UNITS - 1)


def test_a_unit_that_is_used_once_more_costs_no_more_than_itself() -> None:
    again = [*FORWARD[:3], 2, *USUAL[3:]]
    assert counts(USUAL, again) == (2, 2 * UNITS - 1)


def test_units_that_are_left_out_cost_the_first_after_them() -> None:
    shorter = [index for index in USUAL if not 3 < index < 14]
    on_demand, ahead = counts(USUAL, shorter)
    assert on_demand <= 3
    assert on_demand + ahead == len(shorter)


def test_unknown_units_leave_the_order_as_it_is() -> None:
    assert counts(FORWARD[:8], FORWARD) == (1 + 8, 7)
