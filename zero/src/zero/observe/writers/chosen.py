"""Which numbers of a step go to a writer that takes a call for each."""

from __future__ import annotations

from zero.observe.observer import Step


def chosen(step: Step, every: int) -> dict[str, float]:
    """What the program has logged, and of each `every`-th step all metrics."""
    return dict(step.logged) if step.number % every else step.metrics()
