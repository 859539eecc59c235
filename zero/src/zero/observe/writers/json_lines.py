"""A line of JSON for every step and event."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict
from io import FileIO
from math import inf, isfinite
from pathlib import Path

from zero.observe.observer import Event, Observer, Run, Step

_FINITE = json.JSONEncoder(allow_nan=False)


class JsonLines(Observer):
    """Append to a file: {"step": 1, "time": ..., "loss": ..., ...} for a step, with the names of
    `Step.metrics`, and {"event": "save", "step": 100, ...} for an event. The first line says what is
    observed; `units`, bytes of collectives by unit, are in the steps in which they change.

    The first step written takes the place of lines from that step on, so that the file of a run that is
    resumed reads like that of one that was never interrupted; lines that cannot be read, as one that a crash
    has cut short, go with them. Numbers that are not finite are null.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._file: FileIO | None = None
        self._run: Run | None = None
        self._units: Mapping[str, int] = {}

    def begin(self, run: Run) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._run = run

    def step(self, step: Step) -> None:
        line: dict[str, object] = {"step": step.number, "time": step.time, **step.metrics()}
        if step.units != self._units:
            line["units"] = self._units = step.units
        self._write(line, step.number)

    def event(self, event: Event) -> None:
        fields = asdict(event)
        self._write({"event": fields.pop("kind"), **fields, "rates": event.rates}, event.step + 1)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, line: dict[str, object], step: int) -> None:
        if self._run is not None:
            run, self._run = asdict(self._run), None
            self._drop_from(step)
            self._write({"event": "begin", "step": step - 1, "time": time.time(), **run}, step)
        try:
            text = _FINITE.encode(line)
        except ValueError:
            finite = {k: None if isinstance(v, float) and not isfinite(v) else v for k, v in line.items()}
            text = json.dumps(finite)
        if self._file is None:
            self._file = self._path.open("ab", buffering=0)  # a line is there as soon as it is written
        rest = f"{text}\n".encode()
        while rest:  # a write may be short, and the next one say why
            rest = rest[self._file.write(rest) :]

    def _drop_from(self, step: int) -> None:
        self.close()
        if self._path.exists():
            lines = self._path.read_text(encoding="utf-8", errors="replace").split("\n")
            new = self._path.with_name(f"{self._path.name}.new")
            new.write_text("".join(f"{line}\n" for line in lines if _step(line) < step), encoding="utf-8")
            os.replace(new, self._path)


def _step(line: str) -> float:
    """Infinite for a line that cannot be read."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return inf
