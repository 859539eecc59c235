"""The order in which units are needed, as a hint for gathering and reading from disk ahead of use.

The order of the last forward (and backward) is remembered, separately for training and evaluation. If a model
takes another path, no hint matches and its units are gathered on demand; no path is ever required. Since
ranks run the same modules in the same order, they prefetch the same units.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict

from zero.sharding.gather_format import GatherFormat
from zero.sharding.sharded_unit import ShardedUnit, State
from zero.tiers.read_ahead import DEPTH, ReadAhead

Event = tuple[int, GatherFormat]  # by unit index
_LONGEST = 100_000  # uses of units that an order may hold


class Schedule:
    """The order of units, recorded and replayed as a hint.

    ahead: how many units to gather before they are needed. disk: reads shards of the units that come
    after those ahead of their gathers, as many as it has room for; None if no shards are on disk.
    """

    def __init__(self, units: list[ShardedUnit], ahead: int, disk: ReadAhead | None) -> None:
        self._units = units
        self._ahead = ahead
        self._disk = disk
        self._records: dict[bool, list[Event]] = {}
        self._record: list[Event] = []
        self._places: dict[Event, list[int]] = {}  # in the record, ascending; once a path has left it
        self._current: list[Event] = []
        self._cursor = 0
        self._training = False

    def begin(self, training: bool) -> None:
        """Begin a forward of the whole model. training: with gradients, so a backward may follow."""
        if self._current:
            self._records[self._training] = self._current
        self._training = training
        self._record = self._records.get(training, [])
        self._places = {}
        self._current = []
        self._cursor = 0
        if self._disk is not None:
            self._disk.clear()

    def follow(self, unit: ShardedUnit, fmt: GatherFormat) -> None:
        """Begin to gather the units that were needed after `unit` last time; it was gathered just now."""
        if unit.resident:
            return
        self._advance((unit.index, fmt))
        for index, later in self._upcoming(self._ahead):
            self._units[index].start_gather(later)
        if self._disk is not None:
            self._read_ahead()

    def needed_soon(self, unit: ShardedUnit) -> bool:
        """Return whether `unit` would be gathered again at once if it were released now."""
        return any(index == unit.index for index, _ in self._upcoming(1 + self._ahead))

    def _advance(self, event: Event) -> None:
        if len(self._current) < _LONGEST:  # a program may call parts forever
            self._current.append(event)
        if self._record[self._cursor : self._cursor + 1] == [event]:
            self._cursor += 1
        else:  # another path than last time
            self._cursor = self._behind_nearest(event)

    def _behind_nearest(self, event: Event) -> int:
        """The place in the record behind this event; the present place if it is not there, until one comes
        that is. Where a unit is used again out of turn, its use just passed counts, not that of the backward.
        """
        if not self._places:
            self._places = defaultdict(list)
            for place, known in enumerate(self._record):
                self._places[known].append(place)
        if event not in self._places:
            return self._cursor
        places = self._places[event]
        later = bisect_left(places, self._cursor)
        return 1 + min(places[max(later - 1, 0) : later + 1], key=lambda place: abs(place - self._cursor))

    def _read_ahead(self) -> None:
        for index, fmt in self._upcoming(self._ahead + DEPTH)[self._ahead :]:
            unit = self._units[index]
            will_be_gathered = unit.state(fmt) is State.SHARDED or not self.needed_soon(unit)
            if will_be_gathered and not all(group.source.start_read() for group in unit.groups):
                return

    def _upcoming(self, count: int) -> list[Event]:
        return self._record[self._cursor : self._cursor + count]
