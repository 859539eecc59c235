"""The gradient norm that an engine reports."""

from __future__ import annotations

import torch

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
