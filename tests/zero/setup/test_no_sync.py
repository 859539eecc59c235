"""`model.no_sync()`: what loops written for DistributedDataParallel call."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from torch import Tensor, nn

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.models import fresh, language_loss
from tests.zero.helpers.training import adamw


def built(model: nn.Module, stage: int) -> zero.Engine:
    config = zero.Config(stage=stage, timeout=20, accumulate="local", gradient_accumulation_steps=None)
    return zero.initialize(model, adamw(model), config)


def gradients(engine: zero.Engine, context: Context, of_model: bool) -> dict[str, Tensor | None]:
    """Of two micro-batches, of which the first exchanges nothing."""
    model = engine.module
    before = engine.traffic.calls["reduce_scatter"], engine.traffic.calls["all_reduce"]
    with model.no_sync() if of_model else engine.no_sync():
        language_loss(model, 0, context.rank).backward()
    assert before == (engine.traffic.calls["reduce_scatter"], engine.traffic.calls["all_reduce"])
    language_loss(model, 1, context.rank).backward()
    return {name: engine.full_gradient(name) for name, _ in model.named_parameters()}


def same_body(context: Context, stage: int) -> bool:
    found, expected = (gradients(built(fresh(), stage), context, of_model) for of_model in (True, False))
    pairs = [(value, expected[name]) for name, value in found.items()]
    return all(a is b is None or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)


@pytest.mark.parametrize("stage", [1, 3])
def test_it_is_the_engines(cluster: Clusters, stage: int) -> None:
    assert all(cluster(2).run(same_body, stage=stage))


def dropped_body(context: Context) -> bool:
    engine, other = built(fresh(), 3), built(fresh(), 3)
    with engine.no_sync():
        language_loss(engine.module, 0, context.rank).backward()
    engine.optimizer.zero_grad()
    for each in (engine, other):
        language_loss(each.module, 1, context.rank).backward()
    names = [name for name, _ in engine.module.named_parameters()]
    pairs = [(engine.full_gradient(name), other.full_gradient(name)) for name in names]
    return all(a is b is None or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)


@pytest.mark.parametrize("size", [1, 2])
def test_what_it_leaves_is_dropped_by_zero_grad(cluster: Clusters, size: int) -> None:
    assert all(cluster(size).run(dropped_body))


class Own(nn.Linear):
    """Has a no_sync of its own, as a wrapper around a model may."""

    def no_sync(self) -> str:
        return "own"


def own_body(context: Context) -> None:
    model = Own(3, 3)
    engine = built(model, 3)
    assert model.no_sync() == "own"
    assert engine.module is model


def test_a_model_keeps_its_own(cluster: Clusters) -> None:
    cluster(1).run(own_body)


def gone_body(context: Context, stage: int) -> None:
    model = fresh()
    engine = built(model, stage)
    with pytest.raises(zero.ZeroError, match=r"before zero\.initialize"):
        copy.deepcopy(model)
    alive, method = weakref.ref(engine), model.no_sync
    with model.no_sync():
        pass
    del engine
    assert alive() is None
    with pytest.raises(zero.UsageError, match=r"no longer exists: keep what zero\.init"):
        method()


@pytest.mark.parametrize("stage", [1, 3])
def test_it_keeps_no_engine_alive(cluster: Clusters, stage: int) -> None:
    cluster(2).run(gone_body, stage=stage)
