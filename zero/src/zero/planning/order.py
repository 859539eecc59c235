"""In what order units are used, as `Schedule` finds it: each before those inside it, in both directions."""

from __future__ import annotations

from collections.abc import Sequence

from zero.planning.groups import PlannedUnit


def forward_uses(units: Sequence[PlannedUnit]) -> list[PlannedUnit]:
    return [*(unit for unit in units if unit.is_root), *(unit for unit in units if not unit.is_root)]


def backward_uses(units: Sequence[PlannedUnit]) -> list[PlannedUnit]:
    """The units that a backward comes to."""
    forward = forward_uses(units)
    ends = {unit.name: end(unit, forward) for unit in forward}
    return sorted((unit for unit in forward if unit.reached), key=lambda unit: -ends[unit.name])


def end(unit: PlannedUnit, uses: Sequence[PlannedUnit]) -> int:
    """How many uses have begun when those of `unit` and of the units inside it are over."""
    return max(place for place, other in enumerate(uses, 1) if other is unit or unit.contains(other))
