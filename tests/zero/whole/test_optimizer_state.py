"""Whole optimizer state, by a parameter's name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.loops import train_on
from tests.zero.helpers.models import (
    fresh,
    language_loss,
)


def optimizer_state_body(context: Context, stage: int, amsgrad: bool) -> dict[str, float]:
    """Whole optimizer state by name against a plain run on all ranks' batches."""

    def build(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-2, amsgrad=amsgrad, foreach=False)

    plain = fresh()
    reference = build(plain)
    model = fresh()
    engine = zero.initialize(model, build(model), zero.Config(stage=stage, timeout=10))
    for step in range(2):
        for rank in range(context.size):
            (language_loss(plain, step, rank) / context.size).backward()
        reference.step()
        reference.zero_grad()
        train_on(engine, language_loss(model, step, context.rank))
    worst: dict[str, float] = {}
    for name, parameter in plain.named_parameters():
        if not parameter.requires_grad or not parameter.numel():
            continue
        state = engine.full_optimizer_state(name)
        expected = reference.state[parameter]
        assert set(state) == set(expected), (name, set(state))
        for key, value in expected.items():
            assert state[key].shape == value.shape, (name, key)
            difference = (state[key].cpu() - value).abs().max() / value.abs().max().clamp(min=1e-8)
            worst[key] = max(worst.get(key, 0.0), difference.item())
    return worst


@pytest.mark.parametrize(("stage", "amsgrad"), [(3, False), (1, False), (3, True)])
def test_full_optimizer_state(cluster: Clusters, stage: int, amsgrad: bool) -> None:
    for found in cluster(3).run(optimizer_state_body, stage=stage, amsgrad=amsgrad):
        assert {"step", "exp_avg", "exp_avg_sq"} <= set(found)
        assert max(found.values()) < 1e-4, found
