"""Any function that takes names and numbers, such as the loggers of frameworks."""

from __future__ import annotations

from collections.abc import Callable

from zero.observe.observer import Observer, Step, chosen


class Calls(Observer):
    """Calls log({"zero/seconds": 0.2, ...}, step=10) with the metrics of every `every`-th step."""

    def __init__(self, log: Callable[..., object], every: int = 10) -> None:
        self._log, self._every = log, every

    def step(self, step: Step) -> None:
        if told := chosen(step, self._every):
            self._log({f"zero/{name}": number for name, number in told.items()}, step=step.number)
