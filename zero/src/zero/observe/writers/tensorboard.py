"""TensorBoard's event files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zero.errors import extra
from zero.observe.observer import Event, Observer, Run, Step, chosen


class TensorBoard(Observer):
    """Scalars and, for events, text in a folder; needs the package tensorboard.

    every: steps from one in which all metrics are written to the next; what the program logs always is. A
    resumed run goes on after the steps that it has taken.
    """

    def __init__(self, folder: str | Path, every: int = 10) -> None:
        with extra("tensorboard"):
            from torch.utils.tensorboard import SummaryWriter

        self._make, self._folder, self._every = SummaryWriter, str(folder), every
        self._writer: Any = None

    def begin(self, run: Run) -> None:
        self._writer = self._make(self._folder, purge_step=run.steps + 1 if run.steps else None)

    def step(self, step: Step) -> None:
        for name, number in chosen(step, self._every).items():
            self._writer.add_scalar(name, number, step.number, walltime=step.time)

    def event(self, event: Event) -> None:
        self._writer.add_text(event.kind, event.text, event.step, walltime=event.time)

    def close(self) -> None:
        self._writer.close()
