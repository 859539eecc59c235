"""In what order units are needed, as a hint for prefetching.

The order of the last forward (and backward) is remembered, separately for training and evaluation. A
model that takes another path finds no matching hint and is served on demand; nothing asserts on a trace.
Since ranks run the same modules in the same order, they prefetch the same units.
"""

from __future__ import annotations

from contextlib import suppress

import torch

from zero.sharded_unit import ShardedUnit

Event = tuple[int, torch.dtype | None]  # (unit index, cast)


class Schedule:
    """ahead: how many units to gather before they are needed."""

    def __init__(self, units: list[ShardedUnit], ahead: int) -> None:
        self._units = units
        self._ahead = ahead
        self._records: dict[bool, list[Event]] = {}
        self._record: list[Event] = []
        self._current: list[Event] = []
        self._cursor = 0
        self._training = False

    def begin(self, training: bool) -> None:
        """A forward of the whole model starts; training: with gradients, so a backward may follow."""
        self._records[self._training] = self._current
        self._training = training
        self._record = self._records.get(training, [])
        self._current = []
        self._cursor = 0

    def acquire(self, unit: ShardedUnit, cast: torch.dtype | None) -> None:
        """Gather `unit` and start on the units that were needed after it last time."""
        if unit.resident:
            return
        self._advance((unit.index, cast))
        unit.gather(cast)
        for index, later in self._upcoming(self._ahead):
            self._units[index].start_gather(later)

    def needed_soon(self, unit: ShardedUnit) -> bool:
        """Whether `unit` would be gathered again at once if it were released now."""
        return any(index == unit.index for index, _ in self._upcoming(1 + self._ahead))

    def _advance(self, event: Event) -> None:
        self._current.append(event)
        with suppress(ValueError):  # another path than last time: no hint until a known event comes
            self._cursor = self._record.index(event, self._cursor) + 1

    def _upcoming(self, count: int) -> list[Event]:
        return self._record[self._cursor : self._cursor + count]
