"""The console writer: a bar on a terminal, plain lines without one."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console as Terminal

from tests.zero.helpers.observing import step_of
from zero.observe import Console, Event, Run

pytestmark = pytest.mark.host
RUN = Run("Model", "cpu", 0, 1, 10, 2, {})


def told(terminal: bool) -> str:
    into = io.StringIO()
    writer = Console(
        steps=40, show=("validation",), console=Terminal(file=into, width=80, force_terminal=terminal)
    )
    writer.begin(RUN)
    for number in range(3, 41):
        shown = {"validation": 3.25} if number == 20 else {}
        step = step_of(number, loss=2.5, tokens=50, **shown)
        writer.step(replace(step, time=float(number), grad_norm=1.5, flops=6e9, peak_flops=1e13))
    writer.event(Event("save", 40, 0.0, "runs/a/[step-40]"))
    writer.close()
    return into.getvalue()


def test_without_a_terminal_there_are_plain_lines() -> None:
    lines = told(terminal=False).splitlines()
    assert "\x1b" not in "".join(lines)
    steps = [line for line in lines if line.startswith("step ")]
    assert len(steps) == 20  # every second of 38, and the event
    assert "loss 2.500  norm 1.50  100 tokens/s  MFU 6.0%  34 MB" in steps[0]
    assert [line for line in lines if "validation 3.250" in line] == [
        line for line in steps if " 20 " in line
    ]
    assert "0:00:20 left" in next(line for line in steps if " 20 " in line)  # of a second each
    assert "left" not in steps[-2]
    assert "save: runs/a/[step-40]" in steps[-1]


def test_on_a_terminal_there_is_a_bar_with_the_time_that_is_left() -> None:
    text = told(terminal=True)
    assert "40/40" in text
    assert "0:00:00" in text
    assert "loss 2.500  validation 3.250  norm 1.50  100 tokens/s  MFU 6.0%  34 MB" in text
    assert "…" not in text, "nothing is cut on a terminal of 80 columns"
