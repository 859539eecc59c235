"""The gradient norm that an engine reports."""

from __future__ import annotations

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
