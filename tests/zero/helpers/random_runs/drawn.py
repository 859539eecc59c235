"""Runs drawn at random: a model, an optimizer, what is computed, and what is done between steps."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import zero
from tests.zero.helpers.random_runs.mosaic import Mosaic, Recipe

OPTIMIZERS = ("sgd", "adamw", "adam", "lion", "rmsprop", "adagrad", "muon", "foreach")
ACTIONS = (
    "nothing",
    "nothing",
    "nothing",
    "rate",
    "decay",
    "freeze",
    "write",
    "load here",
    "switch",
    "state dict",
    "away",
    "evaluate",
    "generate",
    "look",
    "trace",
    "compare gradient",
    "drop",
    "forward fails",
    "backward fails",
    "two forwards",
    "thrown away",
    "part alone",
)
"""What `Play` has methods for."""


def optimizer_of(name: str, model: nn.Module) -> Any:
    """Two param groups; nothing whose steps jump where a gradient is near zero, but Lion's."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 2e-3}]
    made: dict[str, Callable[[], Optimizer | list[Optimizer]]] = {
        "sgd": lambda: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
        "adamw": lambda: torch.optim.AdamW(groups, lr=5e-3, eps=1e-2),
        "adam": lambda: torch.optim.Adam(groups, lr=5e-3, eps=1e-2, betas=(0.8, 0.9)),
        "lion": lambda: zero.Lion(groups, lr=1e-4),
        "rmsprop": lambda: torch.optim.RMSprop(groups, lr=1e-3, eps=1e-2, momentum=0.5),
        "adagrad": lambda: torch.optim.Adagrad(groups, lr=1e-2, eps=1e-2),
        "foreach": lambda: torch.optim.NAdam(groups, lr=2e-3, eps=1e-2, foreach=True),
        "muon": lambda: [
            torch.optim.Muon(matrices, lr=1e-3),
            torch.optim.AdamW(rest, lr=2e-3, eps=1e-2),
        ],
    }
    return made[name]()


@dataclass(frozen=True)
class Drawn:
    """One run. actions: what is done before each optimizer step. reduce, codes: dtypes in which gradients and
    weights travel."""

    seed: int
    recipe: Recipe
    optimizer: str
    precision: str
    accumulation: int
    clip: float | None
    actions: tuple[str, ...]
    autocast: bool
    reduce: str | None
    codes: str | None
    compiled: bool

    @classmethod
    def draw(cls, seed: int, compiled: bool) -> Drawn:
        rng = random.Random(seed)
        recipe = Recipe.draw(rng)
        precision = rng.choice(("model", "fp32", "fp32", "bf16"))
        return cls(
            seed=seed,
            recipe=recipe.traceable() if compiled else recipe,
            optimizer=rng.choice(OPTIMIZERS),
            precision=precision,
            accumulation=rng.choice((1, 1, 2, 3)),
            clip=rng.choice((None, None, 0.3)),
            actions=tuple(rng.choice(ACTIONS) for _ in range(6)),
            autocast=precision != "bf16" and rng.random() < 0.2,
            reduce=rng.choice((None, None, None, "bf16", "fp32")),
            codes=rng.choice((None,) * 7 + ("int8",)),
            compiled=compiled,
        )

    @property
    def bound(self) -> float:
        """What errors stay below: far above rounding, far below what a lost gradient makes of them."""
        if self.autocast or self.reduce or self.codes or self.precision == "bf16":
            return 0.3
        return 2e-3 if self.optimizer == "muon" else 2e-4  # it multiplies in bf16

    def config(self, settings: dict[str, Any]) -> zero.Config:
        return zero.Config(
            precision=self.precision,
            gradient_accumulation_steps=self.accumulation,
            clip_norm=self.clip,
            reduce_dtype=self.reduce,
            gather_dtype=self.codes if settings["stage"] == 3 else None,
            **settings,
        )

    def model(self, seed: int) -> Mosaic:
        torch.manual_seed(seed)
        return Mosaic(self.recipe)
