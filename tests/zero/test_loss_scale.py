"""A dynamic loss scale that has come to an end of its range does not harm the weights, and comes back."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.models import device_of
from tests.zero.training import adamw
from zero.gradients.loss_scale import LEAST, MOST

STEPS = 160  # more than halve or double any fp32 number out of its range


def made(window: int) -> tuple[nn.Module, zero.Engine]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    config = zero.Config(loss_scale="dynamic", loss_scale_window=window, clip_norm=1.0)
    return model, zero.initialize(model, adamw(model), config)


def step(model: nn.Module, engine: zero.Engine, batch: Tensor) -> float:
    engine.backward(engine(batch.to(device_of(model))).square().mean())
    engine.step()
    assert engine.loss_scale is not None
    return float(engine.loss_scale)


def weights(model: nn.Module) -> Tensor:
    with zero.gathered(model):
        return torch.cat([p.detach().cpu().flatten() for p in model.parameters()])


def ends_body(context: Context) -> None:
    good, bad = torch.ones(2, 4), torch.full((2, 4), torch.nan)
    model, engine = made(2000)
    before = weights(model)
    assert [step(model, engine, bad) for _ in range(STEPS)][-1] == LEAST
    assert torch.equal(weights(model), before)  # all of them were skipped
    step(model, engine, good)
    after = weights(model)
    assert torch.isfinite(after).all()
    assert not torch.equal(after, before)

    model, engine = made(1)
    assert [step(model, engine, torch.zeros(2, 4)) for _ in range(STEPS)][-1] == MOST
    before = weights(model)
    step(model, engine, good)
    assert torch.isfinite(weights(model)).all()
    assert not torch.equal(weights(model), before)


def test_the_scale_stays_in_its_range(cluster: Clusters) -> None:
    cluster(1).run(ends_body)
