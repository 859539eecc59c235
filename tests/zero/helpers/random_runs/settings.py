"""Settings drawn at random of those that do not change what is computed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import zero
from tests.zero.helpers.random_runs.drawn import Drawn

Settings = dict[str, Any]
BY_KERNEL = ("sgd", "adamw", "adam", "lion")


def draw_settings(rng: random.Random, run: Drawn, ranks: int, folder: Path) -> Settings:
    """Arguments of `zero.Config`; folder: for what is on disk."""
    stage = rng.choice((0, 1, 2, 3, 3, 3, 3))
    settings: Settings = {
        "stage": stage,
        "timeout": 30,
        "accumulate": rng.choice(("sharded", "local")),
        "prefetch": rng.choice((0, 1, 1, 3)),
        "units": _draw_units(rng, run, stage),
        "offload": _draw_offload(rng, run, stage, folder),
    }
    if run.precision == "bf16" and run.optimizer in BY_KERNEL and rng.random() < 0.5:
        settings["masters"] = "split"
    copies = [n for n in (2, 4) if n < ranks and ranks % n == 0]
    if stage and copies and rng.random() < 0.4:
        settings["shard_ranks"] = rng.choice(copies)
    if stage == 3 and rng.random() < 0.3:
        settings["persistent_below"] = rng.choice((20, 200))
    if run.compiled and rng.random() < 0.7:
        budget, fuse = rng.choice((0, 1 << 20, "auto")), rng.random() < 0.5
        settings["compile"] = zero.Compile(inner="aot_eager", persist_budget=budget, fuse_casts=fuse)
    return settings


def _draw_units(rng: random.Random, run: Drawn, stage: int) -> Any:
    chosen = rng.choice(("auto", "auto", ("Part",), ("Linear", "Part")))
    by_rank = run.recipe.by_rank and stage == 3  # all ranks have to use the same units then
    return ("Part",) if "Linear" in chosen and by_rank else chosen


def _draw_offload(rng: random.Random, run: Drawn, stage: int, folder: Path) -> Any:
    if rng.random() < 0.5:
        return rng.choice((None, None, None, None, "auto"))
    by_kernel = run.optimizer in BY_KERNEL
    chosen: Settings = {"optimizer": rng.choice(("device", "host", "host", "disk" if by_kernel else "host"))}
    if stage == 3:
        chosen["params"] = rng.choice(("device", "device", "host", "disk"))
    if rng.random() < 0.3:
        chosen["gradients"] = rng.choice(("device", "host", "disk"))
    if chosen["optimizer"] == "host" and by_kernel:
        chosen |= rng.choice(({}, {"step": "device"}))
    if chosen["optimizer"] != "device":
        chosen |= _draw_part(rng, by_kernel)
    if "disk" in chosen.values():
        chosen["path"] = str(folder)
    return chosen


def _draw_part(rng: random.Random, by_kernel: bool) -> Settings:
    """How much of the optimizer's state leaves the device, and in what pieces."""
    part: Settings = {"sub_group_size": rng.choice((64, 256, 1 << 20))} if by_kernel else {}
    how = rng.choice(("all", "all", "fraction", "budget"))
    if how == "fraction":
        part["fraction"] = {"optimizer": rng.choice((0.2, 0.5, 0.9))}
    if how == "budget":
        part["host_budget"] = {"optimizer": rng.choice((1000, 20000))}
    return part
