"""A bar per peer and step result: median, with a whisker from the fastest step to the slowest."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.report import title
from benchmarks.result import Result


def is_possible(results: Sequence[Result]) -> bool:
    """Whether matplotlib is installed and there is something to draw."""
    return find_spec("matplotlib") is not None and any(r.kind == "step" for r in results)


def draw(path: Path, results: Sequence[Result]) -> None:
    """Write a picture of the step results, in the format that the suffix of `path` names."""
    import matplotlib  # type: ignore[import-not-found,unused-ignore]

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = [r for r in results if r.kind == "step"]
    figure, axes = pyplot.subplots(len(steps), figsize=(8, 2.6 * len(steps)), squeeze=False)
    for ax, result in zip(axes[:, 0], steps, strict=True):
        _draw_bars(ax, result)
    figure.tight_layout()
    figure.savefig(path)


def _draw_bars(axes: Any, result: Result) -> None:
    rows = result.rows[::-1]  # the first peer on top
    medians = [r["median"] for r in rows]
    below = [r["median"] - r["min"] for r in rows]
    above = [r["max"] - r["median"] for r in rows]
    colours = ["tab:blue" if r["peer"].startswith("zero") else "tab:gray" for r in rows]
    axes.barh([r["peer"] for r in rows], medians, xerr=[below, above], color=colours, capsize=3)
    axes.set_title(title(result), fontsize=9)
    axes.set_xlabel("seconds per step")
