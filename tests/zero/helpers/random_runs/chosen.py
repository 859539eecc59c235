"""Few runs that draw, together, everything that many do."""

from __future__ import annotations

import random
from dataclasses import asdict
from pathlib import Path

from tests.zero.helpers.random_runs.drawn import Drawn
from tests.zero.helpers.random_runs.settings import draw_settings

RANKS = (1, 2, 4)
MANY = 16
"""Runs of each number of ranks, of which some are chosen."""
ALONE = 2
"""Runs of one rank, which communicates nothing: they count for nothing that is drawn."""

Run = tuple[int, int]
"""A number of ranks, and a seed."""


def chosen(times: int) -> list[Run]:
    """Runs in which everything comes that any of the many draws, `times` times if it is there so often."""
    many = [(ranks, seed) for ranks in RANKS[1:] for seed in range(1000 * ranks, 1000 * ranks + MANY)]
    left = {run: parts_of(run) for run in many}
    found: list[Run] = [(1, seed) for seed in range(1000, 1000 + ALONE * times)]
    for _ in range(times):
        missing = set[str]().union(*left.values())
        while missing:
            best = max(left, key=lambda run: len(left[run] & missing))
            missing -= left.pop(best)
            found.append(best)
    return found


def parts_of(run: Run) -> set[str]:
    """What a run draws: of a model and an optimizer, actions, and settings of its first engine."""
    ranks, seed = run
    drawn = Drawn.draw(seed, compiled=False)
    recipe = asdict(drawn.recipe)
    of_run = {name: value for name, value in asdict(drawn).items() if name not in ("seed", "recipe")}
    settings = draw_settings(random.Random(seed + 1), drawn, ranks, Path())
    offload = settings.pop("offload")
    offload = offload if isinstance(offload, dict) else {"all": offload}
    alike = {"width": None, "order": None, "lends": bool(recipe["lends"])}  # whose numbers hardly matter
    parts = {**recipe, **alike, **of_run, **settings, **{f"offload {k}": v for k, v in offload.items()}}
    return {
        f"{n}: {v}" for n, every in parts.items() for v in (every if isinstance(every, tuple) else [every])
    }
