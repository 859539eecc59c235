"""DeepSpeed's learning rate schedules, beside what DeepSpeed's own do in 1,000 steps."""

from __future__ import annotations

import copy
import json
import os
import pickle
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
from torch.optim.lr_scheduler import ConstantLR, LRScheduler, SequentialLR

import zero
from tests.zero.helpers.deepspeed_schedules import (
    CASES,
    RECORDED,
    SAMPLED,
    STEPS,
    hyper_parameters,
    optimizer,
)
from zero.integrations import deepspeed_schedules as ours

NUMBERED = list(enumerate(CASES))
pytestmark = pytest.mark.host


@pytest.mark.parametrize(("number", "case"), NUMBERED, ids=[f"{i} {case[0]}" for i, case in NUMBERED])
def test_rates_are_those_recorded_from_deepspeed(number: int, case: tuple[str, dict[str, Any]]) -> None:
    recorded = json.loads(RECORDED.read_text())
    assert len(recorded) == len(CASES)
    every = hyper_parameters(ours, *case)
    assert len(every) == STEPS + 1
    for step, expected in zip(SAMPLED, recorded[number], strict=True):
        assert every[step] == pytest.approx(expected, rel=1e-10, abs=1e-15), step


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
@pytest.mark.parametrize("case", CASES, ids=[f"{i} {case[0]}" for i, case in NUMBERED])
def test_rates_are_deepspeeds_in_every_step(
    case: tuple[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "DS_ACCELERATOR", "cpu")
    theirs = pytest.importorskip("deepspeed.runtime.lr_schedules")
    for step, (expected, found) in enumerate(
        zip(hyper_parameters(theirs, *case), hyper_parameters(ours, *case), strict=True)
    ):
        assert found == pytest.approx(expected, rel=1e-12, abs=1e-15), step


@pytest.mark.parametrize("case", CASES, ids=[f"{i} {case[0]}" for i, case in NUMBERED])
def test_a_schedule_goes_on_where_it_was_saved(case: tuple[str, dict[str, Any]]) -> None:
    name, parameters = case
    first = getattr(ours, name)(optimizer(), **parameters)
    for _ in range(150):
        first.optimizer.step()
        first.step()
    saved = json.loads(json.dumps(first.state_dict()))
    second: LRScheduler = getattr(ours, name)(optimizer(), **parameters)
    second.load_state_dict(saved)
    second.optimizer.step()
    for scheduler in (first, second):
        scheduler.step()
    assert second.get_last_lr() == first.get_last_lr()


def test_a_schedule_can_be_pickled_and_copied() -> None:
    made = ours.WarmupDecayLR(optimizer(), 10, warmup_num_steps=2)
    made.optimizer.step()
    made.step()
    for again in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made)):
        assert again.get_lr() == made.get_lr()


def test_what_is_configured_counts_when_a_schedule_goes_on_not_what_was_saved() -> None:
    saved = ours.WarmupDecayLR(optimizer(), 10, warmup_num_steps=1).state_dict() | {"last_epoch": 9}
    longer = ours.WarmupDecayLR(optimizer(), 1001, warmup_num_steps=1)
    longer.load_state_dict(saved)
    longer.optimizer.step()
    longer.step()
    assert longer.get_last_lr() == pytest.approx([0.001 * 0.992] * 2)


@pytest.mark.parametrize("make", [partial(ours.WarmupLR), partial(ours.WarmupCosineLR, total_num_steps=1000)])
def test_a_schedule_that_follows_another_scheduler_has_the_optimizers_own_rates(make: Any) -> None:
    """The first one has set the rates of the param_groups already when the second is made."""
    each = optimizer()
    own = [group["lr"] for group in each.param_groups]
    schedulers = [ConstantLR(each, factor=0.1, total_iters=3), make(each, warmup_num_steps=10)]
    both = SequentialLR(each, schedulers, [3])
    for _ in range(14):
        each.step()
        both.step()
    assert [group["lr"] for group in each.param_groups] == pytest.approx(own, rel=1e-4)


def test_what_a_schedule_refuses() -> None:
    with pytest.raises(
        zero.ConfigError, match="warmup_min_lr has 3 values, but the optimizer 2 param_groups"
    ):
        ours.WarmupLR(optimizer(), warmup_min_lr=[1.0, 2.0, 3.0])
    with pytest.raises(zero.ConfigError, match="warmup_num_steps is 0"):
        ours.WarmupLR(optimizer(), warmup_num_steps=0)
    with pytest.raises(zero.ConfigError, match="'cubic': expected 'log' or 'linear'"):
        ours.WarmupLR(optimizer(), warmup_type="cubic")
