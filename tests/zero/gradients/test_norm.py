"""The gradient norm that an engine reports."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.models import (
    fresh,
    language_loss,
)
from tests.zero.helpers.training import adamw


def norm_body(context: Context) -> list[bool]:
    """Whether there is a norm: before, between and after the micro-batches of two steps, and in a hook."""
    model = fresh()
    optimizer, told = adamw(model), []
    engine = zero.initialize(
        model, optimizer, zero.Config(clip_norm=1.0, gradient_accumulation_steps=2, timeout=10)
    )
    optimizer.register_step_pre_hook(lambda *_: told.append(engine.grad_norm is not None))
    for step in range(4):
        told.append(engine.grad_norm is not None)
        engine.backward(language_loss(model, step, context.rank))
        told.append(engine.grad_norm is not None)
        engine.step()
    told.append(engine.grad_norm is not None)
    assert engine.skipped_steps == 0
    return told


def test_a_norm_is_that_of_this_step_or_none(cluster: Clusters) -> None:
    before, between, there = False, False, True
    first = [before, between, between, between, there]
    for told in cluster(2).run(norm_body):
        assert told == [*first, there, between, between, between, there, there]


def read_body(context: Context) -> list[tuple[bool, bool]]:
    """Without a limit, by step: whether the step measures the norm, and whether there is one."""
    model = fresh()
    optimizer = adamw(model)
    engine = zero.initialize(model, optimizer, zero.Config(timeout=20))
    told = []
    for step in range(6):
        language_loss(model, step, context.rank).backward()
        norms = [p.grad.norm() for p in model.parameters() if p.grad is not None] if step < 5 else []
        if step == 3:
            engine.clip_grad_norm_(1e-3)
        before = engine.traffic.calls["all_reduce"]
        optimizer.step()
        measures = engine.traffic.calls["all_reduce"] > before
        norm = engine.grad_norm if step not in (1, 2) or context.rank else None  # rank 0 looks away
        told.append((measures, norm is not None))
        if norm is not None and norms:
            assert abs(float(norm / torch.stack(norms).norm()) - 1) < 1e-5
        optimizer.zero_grad()
    return told


def test_the_norm_needs_no_limit(cluster: Clusters) -> None:
    """Gradients that the program has measured need no second look; others are measured once a rank asks."""
    first, second = cluster(2).run(read_body)
    assert first == [(False, True), (False, False), (False, False), *[(False, True)] * 2, (True, True)]
    assert second == [*[(False, True)] * 5, (True, True)]


def weights(model: nn.Module) -> Tensor:
    with zero.gathered(model):
        return torch.cat([parameter.detach().cpu().flatten() for parameter in model.parameters()])


def turned_body(context: Context) -> dict[str, tuple[list[Tensor], list[float]]]:
    """The changes of a step with gradients as they are, and with their negatives; the norms; by loop."""
    found = {}
    for way in ("engine", "plain", "in place"):
        changes, norms = [], []
        for sign in (1, -1):
            model = fresh()
            clip_norm = None if way == "in place" else 1e-3
            optimizer = torch.optim.SGD(model.parameters(), lr=100.0)
            engine = zero.initialize(model, optimizer, zero.Config(clip_norm=clip_norm, timeout=20))
            before = weights(model)
            loss = language_loss(model, 0, context.rank)
            engine.backward(loss) if way == "engine" else loss.backward()
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(sign)
            if way == "in place":
                norms.append(float(engine.clip_grad_norm_(1e-3)))
            engine.step() if way == "engine" else optimizer.step()
            assert engine.grad_norm is not None
            norms.append(float(engine.grad_norm))
            changes.append(weights(model) - before)
        found[way] = changes, norms
    return found


def test_negative_gradients_step_the_other_way_and_have_the_same_norm(cluster: Clusters) -> None:
    for found in cluster(2).run(turned_body):
        for way, ((change, opposite), norms) in found.items():
            assert change.abs().max() > 0
            torch.testing.assert_close(opposite, -change, msg=way)
            assert min(norms) > 1e-2, way
            assert max(norms) - min(norms) < 1e-6, way
