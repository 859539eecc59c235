"""Runs as zero.observe.JsonLines writes them, without training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from tests.zero.helpers.observing import step_of
from zero.observe import Event, JsonLines, Run, Step

UNITS = {"embedding": 100, "block.0": 3000, "<root>": 0}
TIMELINE = {
    "capacity": 1000,
    "exact": True,
    "phase": ["forward", "backward", "step"],
    "unit": ["a", "b", ""],
    "seconds": [0.0, 0.010, 0.020],
    **{name: [10, 10, 10] for name in ("parameters", "gathered", "gradients", "optimizer")},
    **{name: [1, 2, 3] for name in ("activations", "other", "temporary")},
}


def full_step(number: int, units: Mapping[str, int] = UNITS, **logged: float) -> Step:
    """A step with everything that a report draws."""
    return replace(
        step_of(number, loss=4 / number, tokens=100.0, **logged),
        time=1000.0 + number,
        phases={"outside": 0.01, "forward": 0.1, "backward": 0.2, "step": 0.05},
        calls={"all_gather": 4},
        bytes={"all_gather": 3100},
        units=units,
        memory={"parameters": 50, "optimizer": 600, "allocated": 700, "peak": 900, "capacity": 1000},
        moved={"to host": 64},
        grad_norm=1.0 / number,
        flops=3.0,
        peak_flops=1e4,
        waited=0.02,
    )


def written(folder: Path, steps: int = 30, units: Mapping[str, int] = UNITS) -> Path:
    """The file of a run."""
    path = folder / "metrics.jsonl"
    writer = JsonLines(path)
    writer.begin(Run("Net", "cpu", 0, 4, 2_000_000, 0, {"stage": 3}))
    for number in range(1, steps + 1):
        writer.step(full_step(number, units, **({"validation_loss": 2.0} if number % 10 == 0 else {})))
    writer.event(Event("memory", steps, 1000.0 + steps, "peak", details=TIMELINE))
    writer.event(Event("save", steps, 1000.0 + steps, "to <b>x</b>", {"write": 0.5}, 5000))
    return path
