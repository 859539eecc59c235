"""A progress bar for people, or plain lines where there is no terminal."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from zero.observe.observer import Event, Observer, Run, Step

if TYPE_CHECKING:
    from rich.console import Console as Terminal

_LINES = 20  # lines printed per run without a terminal
_SMOOTHING = 0.9  # of the displayed speed, per step


class Console(Observer):
    """Progress with the time that is left, the loss, norm, tokens per second and MFU, as far as they are
    known, and whatever else is named.

    steps: the run's last step; None where it is not known. show: names of `Step.metrics` to show besides; a
    bar goes on showing their last values. console: of rich, to write to; by default standard output. Without
    a terminal, it prints about 20 lines per run, or every 10th step, and the steps that have something to
    show.
    """

    def __init__(
        self, steps: int | None = None, show: tuple[str, ...] = (), console: Terminal | None = None
    ) -> None:
        from rich.console import Console as Terminal

        from zero.observe.writers.bar import Bar

        self.console = console or Terminal(highlight=False)
        self._show = show
        self._last_shown: dict[str, float] = {}
        self._every = max(1, steps // _LINES) if steps else 10
        self._steps = steps
        self._speed = 0.0
        self._began: tuple[int, float] | None = None  # the first step that is seen, and when it was over
        self._bar = Bar(self.console, steps)

    def begin(self, run: Run) -> None:
        self._bar.show(run.steps)
        self._bar.start()

    def step(self, step: Step) -> None:
        metrics = step.metrics() if self._show else {}
        shown = {name: metrics[name] for name in self._show if name in metrics}
        if self._began is None:
            self._began = step.number, step.time
        if not self._bar.disable:
            self._last_shown |= shown
            self._bar.show(step.number, self._text(step, self._last_shown))
        elif shown or step.number % self._every == 0:
            text = self._text(step, shown) + self._left(step)
            self.console.print(f"step {step.number:5d}  {text}", soft_wrap=True, markup=False)

    def event(self, event: Event) -> None:
        self.console.print(f"step {event.step:5d}  {event.kind}: {event.text}", soft_wrap=True, markup=False)

    def close(self) -> None:
        self._bar.stop()

    def _left(self, step: Step) -> str:
        """The time that is left, as far as the steps so far tell."""
        first, began = self._began or (step.number, 0.0)
        if not self._steps or not first < step.number < self._steps:
            return ""
        left = (step.time - began) / (step.number - first) * (self._steps - step.number)
        return f"  {timedelta(seconds=round(left))} left"

    def _text(self, step: Step, shown: dict[str, float]) -> str:
        told = [f"loss {step.logged['loss']:.3f}"] if "loss" in step.logged else []
        told += [f"{name.replace('_', ' ')} {n:.3f}" for name, n in shown.items()]
        if step.grad_norm is not None:
            told.append(f"norm {step.grad_norm:.2f}")
        if step.tokens_per_second is not None:
            before = self._speed or step.tokens_per_second
            self._speed = _SMOOTHING * before + (1 - _SMOOTHING) * step.tokens_per_second
            told.append(f"{self._speed:,.0f} tokens/s")
        if step.mfu is not None:
            told.append(f"MFU {step.mfu:.1%}")
        if step.memory.get("peak"):
            told.append(f"{step.memory['peak'] / 1e6:,.0f} MB")
        if step.skipped:
            told.append("skipped: gradients overflow")
        return "  ".join(told)
