"""Prometheus, for a job that others watch."""

from __future__ import annotations

import contextlib
import re
import time
from pathlib import Path
from typing import Any

from zero.errors import UsageError, extra
from zero.observe.observer import Event, Observer, Run, Step

_SECONDS = 1.0  # between files


class Prometheus(Observer):
    """The last step as gauges, `zero_last_loss` and the like; steps, tokens, skipped steps and events as
    counters. Needs the package prometheus_client.

    port: where to answer a Prometheus server, from the first observation to its end. path: of a text file to
    keep up to date instead, for the textfile collector of node_exporter. Raises UsageError without either.
    """

    def __init__(self, port: int | None = None, path: str | Path | None = None) -> None:
        with extra("prometheus"):
            import prometheus_client as client

        if port is None and path is None:
            raise UsageError(
                "Prometheus() answers nobody: give it port=9100, or path='zero.prom' to write to"
            )
        self._client, self._registry = client, client.CollectorRegistry()
        self._path = None if path is None else str(path)
        self._written = 0.0
        self._gauges: dict[str, client.Gauge] = {}
        self._steps = client.Counter("zero_steps", "Optimizer steps.", registry=self._registry)
        self._skipped = client.Counter("zero_skipped_steps", "Steps skipped.", registry=self._registry)
        self._tokens = client.Counter("zero_tokens", "Tokens of all ranks.", registry=self._registry)
        self._events = client.Counter("zero_events", "Events.", ["kind"], registry=self._registry)
        self._port, self._stop = port, contextlib.ExitStack()

    def begin(self, run: Run) -> None:
        """Answer, on the ranks that are told: others make the writer, too, perhaps on the same machine."""
        if self._port is not None:
            server, thread = self._client.start_http_server(self._port, registry=self._registry)
            self._port = None
            for stop in (thread.join, server.server_close, server.shutdown):  # the last is the first called
                self._stop.callback(stop)

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
        self._stop.close()
        self._write()

    def _write(self) -> None:
        if self._path is not None:
            self._written = time.monotonic()
            self._client.write_to_textfile(self._path, self._registry)

    def _gauge(self, name: str) -> Any:
        allowed = "zero_last_" + re.sub(r"\W", "_", name, flags=re.ASCII)
        if allowed not in self._gauges:
            text = f"{name} of the last step."
            self._gauges[allowed] = self._client.Gauge(allowed, text, registry=self._registry)
        return self._gauges[allowed]
