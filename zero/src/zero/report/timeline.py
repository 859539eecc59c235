"""The memory of one step: categories stacked over its time, and the peak of each phase."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zero.config.sizes import human
from zero.report.figures import Spec, X, areas, divided
from zero.report.page import Figure, Page, Section, Table

COLOURS = {
    "parameters": "#4c78a8",
    "gathered": "#72b7b2",
    "gradients": "#f58518",
    "optimizer": "#e45756",
    "activations": "#54a24b",
    "other": "#bab0ac",
    "temporary": "#b279a2",
}
_LABELLED = 0.18  # of the whole: the shortest phase whose name has room above it
_NOTE = (
    "The most in use between points, by category; a point is where a unit is gathered, released or stepped. "
    "Temporary is what was freed again before the next point."
)

Timeline = Mapping[str, Any]
"""Columns with a value for each point, as `MemoryReport.timeline` makes them, and "capacity" and "exact"."""


def page(timeline: Timeline) -> Page:
    """The page of a single step."""
    facts = f"Peak {human(_peak(timeline))} of {human(timeline['capacity'])}."
    return Page("Device memory over a step", [Section("Inside the step", parts(timeline))], facts)


def parts(timeline: Timeline, title: str = "Memory inside a step") -> list[Figure | Table]:
    head, *rows = table(timeline)
    return [
        Figure(title, picture(timeline), _NOTE + _beside(timeline), wide=True),
        Table("Peaks by phase", head, rows),
    ]


def table(timeline: Timeline) -> list[tuple[str, ...]]:
    """A head, and a row for each phase's peak, to which the categories add up."""
    rows = [
        (phase, human(_total(timeline, n)), *(human(timeline[c][n]) for c in COLOURS), timeline["unit"][n])
        for phase, n in highest(timeline).items()
    ]
    return [("phase", "peak", *COLOURS, "unit"), *rows]


def highest(timeline: Timeline) -> dict[str, int]:
    """The number of each phase's first point with the most bytes."""
    found: dict[str, int] = {}
    for n, phase in enumerate(timeline["phase"]):
        if _total(timeline, n) > _total(timeline, found.setdefault(phase, n)):
            found[phase] = n
    return found


def picture(timeline: Timeline) -> Spec:
    """A device that counts its own bytes alone: of all of them. Otherwise other bytes are the process's, and
    left out."""
    shown = {name: c for name, c in COLOURS.items() if timeline["exact"] or name != "other"}
    times = [1000 * seconds for seconds in timeline["seconds"]]
    rows = [
        {
            X: round(ms, 4),
            "phase": timeline["phase"][n],
            "unit": timeline["unit"][n] or "(none)",
            **{name: max(timeline[name][n], 0) for name in shown},
        }
        for n, ms in enumerate(times)
    ]
    spec = areas(rows, shown, "bytes in use", "B", x="milliseconds", stairs=True, told=("phase", "unit"))
    spans = list(_phases(timeline["phase"], times))
    whole = times[-1] - times[0] or 1.0
    labels = [((a + b) / 2, phase) for phase, a, b in spans if b - a >= _LABELLED * whole]
    return divided(spec, [begin for _, begin, _ in spans[1:]], labels)


def _phases(phases: Sequence[str], times: Sequence[float]) -> Iterator[tuple[str, float, float]]:
    """Each stretch of points of one phase: from the point before it to its last."""
    begin = times[0]
    for phase, points in itertools.groupby(range(len(times)), key=phases.__getitem__):
        *_, last = points
        yield phase, begin, times[last]
        begin = times[last]


def _peak(timeline: Timeline) -> int:
    return max(_total(timeline, n) for n in range(len(timeline["phase"])))


def _total(timeline: Timeline, n: int) -> int:
    return sum(timeline[category][n] for category in COLOURS)


def _beside(timeline: Timeline) -> str:
    if timeline["exact"]:
        return ""
    rest = human(min(timeline["other"]))
    return (
        f" More than the job's bytes is counted: beside what is drawn, {rest}, on the host Python and its "
        "libraries. Activations and temporary bytes are by how much the count grew."
    )
