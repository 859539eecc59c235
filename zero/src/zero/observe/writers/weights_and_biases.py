"""Weights & Biases."""

from __future__ import annotations

from typing import Any

from zero.errors import extra
from zero.observe.observer import Event, Observer, Run, Step, chosen


class WeightsAndBiases(Observer):
    """Metrics and events in a run of wandb's; needs the package wandb.

    init: arguments of `wandb.init`, such as project and mode="offline". every: steps from one in which all
    metrics are written to the next; what the program logs always is.
    """

    def __init__(self, every: int = 10, **init: Any) -> None:
        with extra("wandb"):
            import wandb

        self._wandb, self._init, self._every = wandb, init, every
        self._run: Any = None

    def begin(self, run: Run) -> None:
        settings = {"model": run.model, "ranks": run.world_size, "device": run.device, **run.settings}
        self._run = self._wandb.init(**{"config": settings, **self._init})
        self._run.define_metric("*", step_metric="step")

    def step(self, step: Step) -> None:
        if told := chosen(step, self._every):
            self._run.log({"step": step.number, **told})

    def event(self, event: Event) -> None:
        self._run.log({"step": event.step, f"event/{event.kind}": event.text})

    def close(self) -> None:
        self._run.finish()
