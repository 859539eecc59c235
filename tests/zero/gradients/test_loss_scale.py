"""The loss scale: dynamic, fixed, and at an end of its range, where it does not harm the weights."""

from __future__ import annotations

import itertools
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.models import (
    device_of,
    fresh,
    language_loss,
)
from tests.zero.helpers.training import adamw
from zero.gradients.loss_scale import LEAST, MOST
from zero.gradients.skipped_steps import ENDS_AFTER, TOLD_AFTER

STEPS = 60  # more than halve or double the first scale out of its range, fewer than end the job


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


def lasting_body(context: Context, stage: int) -> dict[str, Any]:
    """What each step says while one rank's gradient of one parameter overflows, then for a good step."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    spoiled = context.rank == 1
    model[1].weight.register_hook(lambda gradient: gradient * math.inf if spoiled else gradient)
    engine = zero.initialize(model, adamw(model), zero.Config(stage=stage, loss_scale="dynamic", timeout=20))
    before, raised = weights(model), {}
    told: dict[int, list[warnings.WarningMessage]] = {}
    for number in range(1, ENDS_AFTER + 2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                step(model, engine, torch.ones(2, 4))
            except zero.GradientOverflowError as error:
                raised[number] = str(error)
        told |= dict.fromkeys([number] * len(caught), caught)
    unchanged, skipped, spoiled = torch.equal(weights(model), before), engine.skipped_steps, False
    step(model, engine, torch.ones(2, 4))
    return {
        "told": {number: [(str(w.message), w.filename) for w in caught] for number, caught in told.items()},
        "raised": raised,
        "unchanged": unchanged,
        "counted": (skipped, engine.skipped_steps, engine.steps),
        "trains": not torch.equal(weights(model), before) and bool(weights(model).isfinite().all()),
    }


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.host), 3])
def test_an_overflow_that_lasts_is_told_and_ends_the_job(cluster: Clusters, stage: int) -> None:
    first, second = cluster(2).run(lasting_body, stage=stage)
    assert list(first["told"]) == [TOLD_AFTER]
    ((message, filename),) = first["told"][TOLD_AFTER]
    assert filename == __file__
    assert "20 optimizer steps in a row were skipped" in message
    assert "the first in the backward that is not finite is that of '1.weight' on rank 1." in message
    assert second["told"] == {}
    for found in (first, second):
        assert list(found["raised"]) == [ENDS_AFTER]
        assert "'1.weight' on rank 1." in found["raised"][ENDS_AFTER]
        assert found["unchanged"]
        assert found["trains"]
        assert found["counted"] == (ENDS_AFTER + 1, ENDS_AFTER + 1, ENDS_AFTER + 2)


def begun_body(context: Context) -> list[int]:
    """How many steps were skipped when the warning came, after each number of good steps."""
    found = []
    for good in range(6):
        model, engine = made(2000)
        for number in range(good + TOLD_AFTER + 5):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                step(model, engine, torch.full((2, 4), 1.0 if number < good else torch.nan))
            found += [number + 1 - good] * len(caught)
    return found


def test_the_warning_comes_in_time_whenever_it_begins(cluster: Clusters) -> None:
    assert cluster(1).run(begun_body) == [[TOLD_AFTER] * 6]


def sum_body(context: Context) -> list[str]:
    """fp16 gradients that overflow in the sum over ranks only; and an overflow that comes and goes."""
    model = nn.Linear(1, 1, bias=False)
    engine = zero.initialize(model, adamw(model), zero.Config(precision="fp16", loss_scale=1.0, timeout=20))
    huge = torch.full((1, 1), 4e4, dtype=torch.float16, device=device_of(model))
    told = []
    for number in range(60):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine.backward(engine(huge if number < 22 or number % 19 else huge * 0).sum())
            engine.step()
        told += [str(warning.message) for warning in caught]
    return told


def test_a_sum_that_overflows_is_told_apart_and_shorter_runs_are_not_told(cluster: Clusters) -> None:
    first, second = cluster(2).run(sum_body)
    (message,) = first
    assert "each rank's own gradients are finite" in message
    assert "reduce_dtype='fp32'" in message
    assert second == []


def loss_scale_body(context: Context, path: str) -> dict[str, Any]:
    """Dynamic loss scaling: overflow skips the step and halves the scale, a run of good steps doubles it."""
    model = fresh()
    config = zero.Config(precision="fp16", loss_scale_window=2, timeout=10)
    engine = zero.initialize(model, adamw(model), config)
    scales, kept, counted = [], [], []

    def step(factor: float) -> None:
        weights = engine.full_master("blocks.0.up.weight")
        engine.backward(language_loss(model, 0, context.rank) * factor)
        assert engine.step()
        assert engine.loss_scale is not None
        scales.append(engine.loss_scale.item())
        kept.append(torch.equal(weights, engine.full_master("blocks.0.up.weight")))
        counted.append(engine.skipped_steps)

    for factor in (1.0, 1.0, 1e30 if context.rank == 0 else 1.0, 1.0, 1.0, 1.0):
        step(factor)
    state = engine.full_optimizer_state("blocks.0.up.weight")
    engine.save_checkpoint(path)
    engine.backward(language_loss(model, 0, context.rank) * math.inf)
    engine.step()
    counted.append(engine.skipped_steps)
    engine.load_checkpoint(path)
    counted.append(engine.skipped_steps)
    return {
        "scales": scales,
        "kept": kept,
        "counted": counted,
        "step": state["step"].item(),
        "steps": engine.steps,
    }


def test_dynamic_loss_scale(cluster: Clusters, tmp_path: Path) -> None:
    """One rank's overflow skips the step on all; skipped steps do not count for Adam."""
    for found in cluster(2).run(loss_scale_body, path=str(tmp_path / "saved")):
        scales = found["scales"]
        skipped = found["kept"]
        assert skipped[2]
        for index in range(1, len(scales)):
            ratio = scales[index] / scales[index - 1]
            assert ratio == 0.5 if skipped[index] else ratio in (1.0, 2.0)
        assert any(b == 2 * a for a, b in itertools.pairwise(scales))
        assert found["step"] == 6 - sum(skipped)
        assert found["steps"] == 6
        counted = list(itertools.accumulate(skipped))
        assert found["counted"] == [*counted, counted[-1] + 1, counted[-1]]


def fixed_scale_body(context: Context, path: str) -> tuple[float, float]:
    scales = []
    for scale in ("dynamic", 128.0, "dynamic"):
        model = fresh()
        engine = zero.initialize(model, adamw(model), zero.Config(loss_scale=scale, timeout=10))
        if not scales:
            engine.save_checkpoint(path)
        engine.load_checkpoint(path)
        assert engine.loss_scale is not None
        scales.append(engine.loss_scale.item())
    return scales[1], scales[2]


def test_a_fixed_loss_scale_stays(cluster: Clusters, tmp_path: Path) -> None:
    for fixed, dynamic in cluster(2).run(fixed_scale_body, path=str(tmp_path)):
        assert fixed == 128.0
        assert dynamic == 2.0**16
