"""Runs with state on the host, with every value that they leave behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero
from accelz.conformance.cluster import Context
from tests.zero.helpers.loops import Training
from tests.zero.helpers.models import fresh, language_loss
from tests.zero.helpers.training import Loss, adamw

STEPS = 6
HOST = {"optimizer": "host"}
Between = Callable[[zero.Engine, int], None]  # (engine, step): what a user does between backward and step


@dataclass
class Course:
    """A run, and every value that it left behind."""

    losses: list[float] = field(default_factory=list)
    values: dict[str, Tensor] = field(default_factory=dict)


@contextmanager
def survived(error: type[Exception] | None) -> Iterator[None]:
    if error is None:
        yield
        return
    with pytest.raises(error):
        yield


def course(
    context: Context,
    *,
    offload: dict[str, Any] = HOST,
    model: Callable[[], nn.Module] = fresh,
    loss: Loss = language_loss,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
    between: Between | None = None,
    after: Between | None = None,
    raises: tuple[int, type[Exception]] | None = None,
    **settings: Any,
) -> Course:
    """Train. raises: in which backward, and what."""
    tiers = zero.Offload(**offload)
    training = Training(net := model(), optimizer(net), zero.Config(offload=tiers, timeout=20, **settings))
    engine, run = training.engine, Course()
    for step in range(STEPS):
        value = loss(net, step, context.rank)
        with survived(raises[1] if raises and raises[0] == step else None):
            training.backward(value)
            if between is not None:
                between(engine, step)
            training.step()
        if after is not None:
            after(engine, step)
        run.losses.append(value.item())
        del value
    for name, parameter in net.named_parameters():
        run.values[name] = engine.full_master(name)
        if parameter.requires_grad:
            state = engine.full_optimizer_state(name)
            run.values |= {f"{name} {key}": value for key, value in state.items()}
    return run


def same(first: Course, second: Course) -> bool:
    return repr(first.losses) == repr(second.losses) and all(
        torch.equal(value.nan_to_num(), second.values[name].nan_to_num())
        for name, value in first.values.items()
    )
