"""Runs whose host state is stepped ahead or at the step, with every value that they leave behind."""

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
from tests.zero.helpers.models import fresh, language_loss
from tests.zero.helpers.training import Loss, adamw

STEPS = 6
HOST = {"optimizer": "host"}
Between = Callable[[zero.Engine, int], None]  # (engine, step): what a user does between backward and step


@dataclass
class Course:
    """A run, every value that it left behind, and how much of it was stepped ahead."""

    losses: list[float] = field(default_factory=list)
    values: dict[str, Tensor] = field(default_factory=dict)
    taken: int = 0
    wasted: int = 0


@contextmanager
def survived(error: type[Exception] | None) -> Iterator[None]:
    if error is None:
        yield
        return
    with pytest.raises(error):
        yield


def course(
    context: Context,
    overlap: bool,
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
    """Train, stepping what is on the host ahead or at the step. raises: in which backward, and what."""
    tiers = zero.Offload(**offload, overlap=overlap)
    engine = zero.initialize(
        net := model(), optimizer(net), zero.Config(offload=tiers, timeout=20, **settings)
    )
    run = Course()
    for step in range(STEPS):
        value = loss(net, step, context.rank)
        with survived(raises[1] if raises and raises[0] == step else None):
            engine.backward(value)
            if between is not None:
                between(engine, step)
            engine.step()
        if after is not None:
            after(engine, step)
        run.losses.append(value.item())
        del value
    for name, parameter in net.named_parameters():
        run.values[name] = engine.full_master(name)
        if parameter.requires_grad:
            state = engine.full_optimizer_state(name)
            run.values |= {f"{name} {key}": value for key, value in state.items()}
    if overlap:
        ahead = engine._sharded_optimizer._speculative
        assert ahead is not None
        run.taken, run.wasted = ahead.committed, ahead.wasted
    return run


def same(first: Course, second: Course) -> bool:
    return repr(first.losses) == repr(second.losses) and all(
        torch.equal(value.nan_to_num(), second.values[name].nan_to_num())
        for name, value in first.values.items()
    )
