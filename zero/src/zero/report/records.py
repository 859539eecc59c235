"""What `zero.observe.JsonLines` has written, read back."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, FiniteFloat, ValidationError

from zero.errors import StateError
from zero.observe.observer import ALONE, KINDS
from zero.report.figures import X

POINTS = 1000
"""The most points of a line in a picture; where there are more steps, a point is the mean of several."""
_OWN = (*ALONE, "time", "step", "tokens", "units")

Row = Mapping[str, Any]


class _Event(BaseModel, strict=True):
    """What a line that tells of an event has; see `zero.observe.Event`."""

    event: str
    step: FiniteFloat
    time: FiniteFloat = 0.0
    text: str = ""
    seconds: dict[str, FiniteFloat] = {}
    bytes: FiniteFloat = 0.0


class _Begin(_Event):
    """What the line has that says what is observed; see `zero.observe.Run`."""

    model: str
    device: str
    rank: int
    world_size: int
    parameters: FiniteFloat
    settings: dict[str, Any]


class _Step(BaseModel, strict=True, extra="allow"):
    """What the line of a step has: numbers of any names, and units."""

    step: FiniteFloat
    time: FiniteFloat
    units: dict[str, FiniteFloat] = {}
    __pydantic_extra__: dict[str, FiniteFloat | None]


@dataclass(frozen=True)
class Records:
    """path: of the file. runs: what was observed, once more for each time that it was resumed. steps, events:
    lines by the names of `Step.metrics` and the fields of `Event`; a number that is not finite is None."""

    path: Path
    runs: Sequence[Row]
    steps: Sequence[Row]
    events: Sequence[Row]

    def names(self, kind: str = "") -> list[str]:
        """Those of a kind, such as "seconds" for "seconds/forward", or with "" of what the program logged, in
        the order in which they came; without those that are 0 throughout."""
        found = dict.fromkeys(
            name for row in self.steps for name, n in row.items() if n and _kind(name) == kind
        )
        return [name.removeprefix(f"{kind}/") for name in found]

    def column(self, name: str) -> list[float]:
        """All values that there are."""
        return [row[name] for row in self.steps if row.get(name) is not None]

    def rows(self, names: Sequence[str], kind: str = "") -> list[dict[str, float | None]]:
        """At most `POINTS` rows of these numbers, by their names without the kind, over steps."""
        size = math.ceil(len(self.steps) / POINTS)
        keys = {name: f"{kind}/{name}" if kind else name for name in names}
        parts = (self.steps[n : n + size] for n in range(0, len(self.steps), size))
        return [
            {X: part[-1]["step"], **{name: _mean(part, key) for name, key in keys.items()}} for part in parts
        ]

    def units(self) -> dict[str, float]:
        """Bytes of a step by unit, as a mean over all steps; written where they change."""
        total: dict[str, float] = {}
        now: Mapping[str, int] = {}
        for row in self.steps:
            now = row.get("units", now)
            for unit, nbytes in now.items():
                total[unit] = total.get(unit, 0) + nbytes
        return {unit: nbytes / len(self.steps) for unit, nbytes in total.items() if nbytes}


def read(path: Path) -> Records:
    """Of a file, or of the only one in a folder whose name ends in .jsonl. Raises StateError."""
    if not path.exists():
        raise StateError(f"there is no {path}: give the file that JsonLines has written, or its folder")
    if path.is_dir():
        found = sorted(path.glob("*.jsonl"))
        if len(found) != 1:
            there = f"has {len(found)}: {', '.join(map(str, found))}" if found else "has none"
            raise StateError(
                f"a report is made of one file of JSON lines, as JsonLines writes; {path} {there}"
            )
        (path,) = found
    if not path.is_file():
        raise StateError(f"{path} is no regular file: give the file that JsonLines has written")
    lines = list(_lines(path))
    events = [line for line in lines if "event" in line]
    steps = [line for line in lines if "event" not in line]
    if not steps:
        raise StateError(
            f"{path} has no steps: a line is written once the next step has begun, or at the end"
        )
    begun = [event for event in events if event["event"] == "begin"]
    return Records(path, begun, steps, [event for event in events if event["event"] != "begin"])


def _lines(path: Path) -> Iterator[Row]:
    """The last line may be incomplete, in a run that goes on."""
    texts = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for number, text in enumerate(texts, start=1):
        try:
            line = _checked(json.loads(text, parse_constant=lambda _: None))
        except (ValueError, TypeError, RecursionError) as error:
            if number == len(texts):
                return
            told = _told(error) if isinstance(error, ValidationError) else error
            raise StateError(f"{path}, line {number}, is not what JsonLines writes: {told}") from error
        yield line


def _checked(line: dict[str, Any]) -> Row:
    kind = _Step if "event" not in line else _Begin if line["event"] == "begin" else _Event
    kind.model_validate(line)
    return line


def _told(error: ValidationError) -> str:
    first = error.errors()[0]
    return "".join(f"{part}: " for part in first["loc"]) + first["msg"]


def _kind(name: str) -> str | None:
    """None for numbers of the engine that have no kind."""
    if name in _OWN:
        return None
    kind, _, rest = name.partition("/")
    return kind if rest and kind in KINDS else ""


def _mean(rows: Iterable[Row], key: str) -> float | None:
    values = [row[key] for row in rows if row.get(key) is not None]
    return sum(values) / len(values) if values else None
