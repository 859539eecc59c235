"""OpenTelemetry's spans, through its API alone: the program chooses where they go."""

from __future__ import annotations

from zero.errors import extra
from zero.observe.observer import Event, Observer, Step


class OpenTelemetry(Observer):
    """A span for every step, with its metrics as attributes, and for every event; needs the package
    opentelemetry-api, and a tracer provider that the program has set."""

    def __init__(self) -> None:
        with extra("opentelemetry"):
            from opentelemetry import trace

        self._tracer = trace.get_tracer("zero")

    def step(self, step: Step) -> None:
        self._span("step", step.time, sum(step.phases.values()), {"step": step.number, **step.metrics()})

    def event(self, event: Event) -> None:
        seconds = sum(event.seconds.values())
        known = {"step": event.step, "text": event.text, "bytes": event.bytes}
        self._span(event.kind, event.time, seconds, known)

    def _span(
        self, name: str, end: float, seconds: float, attributes: dict[str, float] | dict[str, object]
    ) -> None:
        begin, over = (int(1e9 * at) for at in (end - seconds, end))
        self._tracer.start_span(f"zero {name}", attributes=attributes, start_time=begin).end(over)
