"""Runs with state on the host, with every value that they leave behind on each rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import zero
from accelz.conformance.cluster import Context
from tests.zero.helpers.kept import different, kept_values
from tests.zero.helpers.loops import Training
from tests.zero.helpers.models import fresh, language_loss
from tests.zero.helpers.training import Loss, adamw

HOST = {"optimizer": "host"}
Between = Callable[[zero.Engine, int], None]  # (engine, step): what a user does between backward and step


@dataclass
class Course:
    """A run, and every value that it left behind on this rank."""

    losses: list[float] = field(default_factory=list)
    values: dict[str, Tensor] = field(default_factory=dict)


def course(
    context: Context,
    *,
    offload: dict[str, Any] = HOST,
    model: Callable[[], nn.Module] = fresh,
    loss: Loss = language_loss,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
    between: Between | None = None,
    after: Between | None = None,
    steps: int = 4,
    **settings: Any,
) -> Course:
    """Train for so many micro-batches."""
    tiers = zero.Offload(**offload)
    training = Training(net := model(), optimizer(net), zero.Config(offload=tiers, timeout=20, **settings))
    engine, run = training.engine, Course()
    for step in range(steps):
        value = loss(net, step, context.rank)
        training.backward(value)
        if between is not None:
            between(engine, step)
        training.step()
        if after is not None:
            after(engine, step)
        run.losses.append(value.item())
        del value
    run.values = kept_values(engine)
    return run


def same(first: Course, second: Course) -> bool:
    return repr(first.losses) == repr(second.losses) and not different(first.values, second.values)
