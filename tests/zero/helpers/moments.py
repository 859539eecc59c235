"""An engine whose moments are kept narrow: trained, and its weights and state read, in every tier."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import zero
from tests.zero.helpers.loops import train_on
from tests.zero.helpers.models import fresh, language_loss

STEPS = 4
NAMES = ("blocks.0.up.weight", "gain", "turned")
Optimizers = Callable[[nn.Module], Optimizer]


def engine_of(optimizer: Optimizers, **settings: Any) -> zero.Engine:
    model = fresh()
    return zero.initialize(model, optimizer(model), zero.Config(timeout=20, **settings))


def trained(engine: zero.Engine, steps: int = STEPS) -> list[float]:
    """All ranks have the same batches, so that their mean is what one rank has."""
    losses = []
    for step in range(steps):
        loss = language_loss(engine.module, step, 0)
        train_on(engine, loss)
        losses.append(loss.item())
    return losses


def values_of(engine: zero.Engine) -> dict[str, Tensor]:
    """Weights and optimizer state of some parameters, whole, on the host."""
    state = {
        f"{name}.{key}": value for name in NAMES for key, value in engine.full_optimizer_state(name).items()
    }
    weights = {name: engine.full_master(name) for name in NAMES}
    return {name: value.cpu() for name, value in (weights | state).items()}


def ways(path: str) -> dict[str, dict[str, Any]]:
    return {
        "stage 0": {"stage": 0},
        "stage 1": {"stage": 1},
        "on the host": {"offload": zero.Offload(optimizer="host", sub_group_size=64)},
        "on disk": {"offload": zero.Offload(optimizer="disk", path=path, sub_group_size=64)},
        "16 bits, on disk": {
            "precision": "bf16",
            "offload": zero.Offload(optimizer="disk", path=path),
        },
        "16 bits": {"precision": "bf16"},
    }


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(v, second[k]) for k, v in first.items())
