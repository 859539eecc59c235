"""Prometheus, for a job that others watch."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

from zero.observe.observer import Event, Observer, Step

_SECONDS = 1.0  # between files


class Prometheus(Observer):
    """The last step as gauges, `zero_last_loss` and the like; steps, tokens, skipped steps and events as
    counters. Needs the package prometheus_client.

    port: where to answer a Prometheus server. path: of a text file to keep up to date instead, for the
    textfile collector of node_exporter.
    """

    def __init__(self, port: int | None = None, path: str | Path | None = None) -> None:
        import prometheus_client as client

        self._client, self._registry = client, client.CollectorRegistry()
        self._path = None if path is None else str(path)
        self._written = 0.0
        self._gauges: dict[str, client.Gauge] = {}
        self._steps = client.Counter("zero_steps", "Optimizer steps.", registry=self._registry)
        self._skipped = client.Counter("zero_skipped_steps", "Steps skipped.", registry=self._registry)
        self._tokens = client.Counter("zero_tokens", "Tokens of all ranks.", registry=self._registry)
        self._events = client.Counter("zero_events", "Events.", ["kind"], registry=self._registry)
        if port is not None:
            client.start_http_server(port, registry=self._registry)

    def step(self, step: Step) -> None:
        self._steps.inc()
        self._skipped.inc(step.skipped)
        self._tokens.inc(step.logged.get("tokens", 0) * step.ranks)
        for name, number in {"step": step.number, **step.metrics()}.items():
            self._gauge(name).set(number)
        if time.monotonic() - self._written > _SECONDS:
            self._write()

    def event(self, event: Event) -> None:
        self._events.labels(event.kind).inc()

    def close(self) -> None:
        self._write()

    def _write(self) -> None:
        if self._path is not None:
            self._written = time.monotonic()
            self._client.write_to_textfile(self._path, self._registry)

    def _gauge(self, name: str) -> Any:
        if name not in self._gauges:
            allowed = "zero_last_" + re.sub(r"\W", "_", name)
            text = f"{name} of the last step."
            self._gauges[name] = self._client.Gauge(allowed, text, registry=self._registry)
        return self._gauges[name]
