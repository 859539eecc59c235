"""A line of JSON for every step and event."""

from __future__ import annotations

import json
from dataclasses import asdict
from math import isfinite
from pathlib import Path

from zero.observe.observer import Event, Observer, Run, Step


class JsonLines(Observer):
    """Append to a file: {"step": 1, "time": ..., "loss": ..., ...} for a step, with the names of
    `Step.metrics`, and {"event": "save", "step": 100, ...} for an event.

    The first step written takes the place of lines from that step on, so that the file of a run that is
    resumed reads like that of one that was never interrupted. Numbers that are not finite are null.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._first = True

    def begin(self, run: Run) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)

    def step(self, step: Step) -> None:
        self._write({"step": step.number, "time": step.time, **step.metrics()}, step.number)

    def event(self, event: Event) -> None:
        fields = asdict(event)
        self._write({"event": fields.pop("kind"), **fields}, event.step + 1)

    def _write(self, line: dict[str, object], step: int) -> None:
        if self._first:
            self._first = False
            self._drop_from(step)
        finite = {k: None if isinstance(v, float) and not isfinite(v) else v for k, v in line.items()}
        with self._path.open("a") as file:
            file.write(json.dumps(finite) + "\n")

    def _drop_from(self, step: int) -> None:
        lines = self._path.read_text().splitlines(keepends=True) if self._path.exists() else []
        self._path.write_text("".join(line for line in lines if json.loads(line)["step"] < step))
