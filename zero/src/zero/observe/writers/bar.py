"""A progress bar with a line of text below, which is whole on narrow terminals, too."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text


class Bar(Progress):
    """steps: in all; None where it is not known. Nothing is drawn where `console` is no terminal."""

    def __init__(self, console: Console, steps: int | None) -> None:
        self.text = ""
        columns = TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=None), TimeRemainingColumn()
        super().__init__(*columns, console=console, expand=True, disable=not console.is_terminal)
        self._task = self.add_task("", total=steps)

    def show(self, step: int, text: str = "") -> None:
        """step: the last that is over."""
        self.text = text
        self.update(self._task, completed=step)

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        yield Text(self.text)
