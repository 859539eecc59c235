"""What a run shows and records: a progress bar (plain lines without a terminal) and metrics.jsonl."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_LINES = 20  # lines printed per run without a terminal
_SMOOTHING = 0.9  # of the displayed speed, per step


class Report:
    """A context manager around the training loop. Every rank has one; only rank 0's prints and writes.

    steps: the run's last step. start: the step after which it begins; later lines of an older metrics.jsonl
    are dropped, so that the file of a resumed run reads like that of one that was never interrupted.
    """

    def __init__(self, directory: Path, steps: int, start: int, speaks: bool) -> None:
        self.console = Console(quiet=not speaks, highlight=False)
        self._path = directory / "metrics.jsonl" if speaks else None
        self._every = max(1, steps // _LINES)
        self._speed = 0.0
        self._validation = ""
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not (speaks and self.console.is_terminal),
        )
        self._task = self._bar.add_task("", total=steps, completed=start, text="")
        if self._path is not None:
            _keep_until(self._path, start)

    def __enter__(self) -> Report:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def step(self, step: int, loss: float, rate: float, speed: float, memory: list[int]) -> None:
        """Report a step. rate: learning rate. speed: tokens per second. memory: bytes of each rank."""
        self._write(step=step, loss=loss, lr=rate, tokens_per_second=speed, memory=memory)
        self._speed = _SMOOTHING * self._speed + (1 - _SMOOTHING) * speed if self._speed else speed
        text = f"loss {loss:.3f}{self._validation}  {self._speed:,.0f} tokens/s  {mebibytes(memory)}"
        self._bar.update(self._task, completed=step, text=text)
        if self._bar.disable and step % self._every == 0:
            self.console.print(f"step {step:5d}  {text}", soft_wrap=True)

    def validation(self, step: int, loss: float) -> None:
        """Report a validation loss, in nats per byte."""
        self._write(step=step, validation_loss=loss)
        self._validation = f"  validation {loss:.3f}"

    def say(self, text: str) -> None:
        self.console.print(escape(text), soft_wrap=True)

    def _write(self, **record: Any) -> None:
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(record) + "\n")


def mebibytes(memory: list[int]) -> str:
    """Bytes of each rank as "412 + 409 MiB"."""
    return " + ".join(f"{n / 2**20:.0f}" for n in memory) + " MiB"


def _keep_until(path: Path, step: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = path.read_text().splitlines(keepends=True) if step and path.exists() else []
    path.write_text("".join(line for line in lines if json.loads(line)["step"] <= step))
