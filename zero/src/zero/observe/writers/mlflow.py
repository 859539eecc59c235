"""MLflow."""

from __future__ import annotations

import time
from typing import Any

from zero.errors import extra
from zero.observe.observer import Event, Observer, Run, Step, chosen

_SECONDS = 5.0  # between calls to the tracking server
_MOST = 1000  # metrics of a call


class MLflow(Observer):
    """Metrics, settings and events in a run of MLflow's; needs the package mlflow, or mlflow-skinny
    with sqlalchemy and alembic.

    experiment: its name. tracking_uri: of a server or database, such as "sqlite:///runs.db" without any
    network; by default as MLFLOW_TRACKING_URI says. every: steps from one in which all metrics are written to
    the next; what the program logs always is. Metrics are sent together, every few seconds.
    """

    def __init__(self, experiment: str = "zero", tracking_uri: str | None = None, every: int = 10) -> None:
        with extra("mlflow"):
            from mlflow import MlflowClient
            from mlflow.entities import Metric, Param

        self._make, self._uri = MlflowClient, tracking_uri
        self._client: Any = None
        self._metric, self._param = Metric, Param
        self._experiment, self._every = experiment, every
        self._run_id = ""
        self._waiting: list[Any] = []
        self._sent = 0.0

    def begin(self, run: Run) -> None:
        """Open the database on the rank that is told: the others make the writer, too, and a new database
        that two of them set up at one time is broken."""
        self._client = self._make(self._uri)
        known = self._client.get_experiment_by_name(self._experiment)
        place = known.experiment_id if known else self._client.create_experiment(self._experiment)
        self._run_id = self._client.create_run(place).info.run_id
        facts = {"model": run.model, "ranks": run.world_size, "device": run.device, **run.settings}
        params = [self._param(name, str(value)[:500]) for name, value in facts.items()]
        self._client.log_batch(self._run_id, params=params)

    def step(self, step: Step) -> None:
        milliseconds = int(1000 * step.time)
        numbers = chosen(step, self._every)
        self._waiting += [self._metric(n, x, milliseconds, step.number) for n, x in numbers.items()]
        if time.monotonic() - self._sent > _SECONDS:
            self._send()

    def event(self, event: Event) -> None:
        self._client.set_tag(self._run_id, f"{event.kind} after step {event.step}", event.text)

    def close(self) -> None:
        self._send()
        self._client.set_terminated(self._run_id)

    def _send(self) -> None:
        self._sent = time.monotonic()
        for begin in range(0, len(self._waiting), _MOST):
            self._client.log_batch(self._run_id, metrics=self._waiting[begin : begin + _MOST])
        self._waiting.clear()
