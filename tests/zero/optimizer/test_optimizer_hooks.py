"""The user's optimizer under an engine: what keeps working, and what says what to use instead."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.loops import train_on
from tests.zero.helpers.models import (
    Stack,
    features,
    fresh,
    language_loss,
)
from tests.zero.helpers.paths import STRAIGHT
from tests.zero.helpers.training import adamw


def build(offload: Any) -> zero.Engine:
    model = fresh()
    return zero.initialize(model, adamw(model), zero.Config(timeout=20, precision="bf16", offload=offload))


def one_step(context: Context, engine: zero.Engine, step: int) -> None:
    train_on(engine, language_loss(engine.module, step, context.rank))


def state_dict_body(context: Context, path: str) -> list[tuple[str, str]]:
    """State dicts are refused on every tier; state stays as it is, and schedulers keep working."""
    told = []
    for offload in (None, zero.Offload(optimizer="host"), zero.Offload(optimizer="disk", path=path)):
        theirs = adamw(fresh()).state_dict()
        engine = build(offload)
        scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer, 1, gamma=0.5)
        one_step(context, engine, 0)
        scheduler.step()
        before = engine.full_optimizer_state("blocks.0.up.weight")
        with pytest.raises(zero.UsageError) as saving:
            engine.optimizer.state_dict()
        with pytest.raises(zero.UsageError) as loading:
            engine.optimizer.load_state_dict(theirs)
        for copied in (copy.copy, copy.deepcopy, pickle.dumps, lambda o: torch.save(o, io.BytesIO())):
            with pytest.raises(zero.UsageError, match=r"only this rank's slices: engine\.save_checkpoint"):
                copied(engine.optimizer)
        after = engine.full_optimizer_state("blocks.0.up.weight")
        assert all(torch.equal(value, after[key]) for key, value in before.items())
        scheduler.load_state_dict(scheduler.state_dict())
        one_step(context, engine, 1)
        assert [group["lr"] for group in engine.optimizer.param_groups] == [0.005, 0.005]
        told.append((str(saving.value), str(loading.value)))
    return told


def test_state_dicts_of_slices_are_refused(cluster: Clusters, tmp_path: Path) -> None:
    for told in cluster(2).run(state_dict_body, path=str(tmp_path)):
        for saving, loading in told:
            assert "engine.save_checkpoint" in saving
            assert "full_optimizer_state" in saving
            assert "engine.load_checkpoint" in loading


def pickle_body(context: Context, path: str) -> None:
    """Pickling state on disk gives a clear error, not that of a lock somewhere inside."""
    engine = build(zero.Offload(optimizer="disk", path=path))
    one_step(context, engine, 0)
    for state in engine.optimizer.state.values():
        with pytest.raises(zero.UsageError, match=r"cannot be pickled or copied: engine\.save_checkpoint"):
            torch.save(state, io.BytesIO())
        with pytest.raises(zero.UsageError, match="cannot be pickled or copied"):
            copy.deepcopy(state)
    with pytest.raises(zero.ShardedParameterError, match="keeps elsewhere between steps"):
        copy.deepcopy(engine.optimizer.state)


def test_state_on_disk_is_not_pickled(cluster: Clusters, tmp_path: Path) -> None:
    cluster(1).run(pickle_body, path=str(tmp_path))


def hooks_body(context: Context) -> list[str]:
    """The user's hooks, registered before or after the engine was made, are called around its step."""
    called: list[str] = []
    model = fresh()
    optimizer = adamw(model)
    optimizer.register_step_pre_hook(lambda *_: called.append("before, early"))
    engine = zero.initialize(model, optimizer, zero.Config(timeout=20))
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    one_step(context, engine, 0)
    return called


def test_step_hooks_are_called(cluster: Clusters) -> None:
    for called in cluster(2).run(hooks_body):
        assert called == ["before, early", "before", "after"]


KINDS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "by a kernel": adamw,
    "slices": lambda m: torch.optim.RMSprop(m.parameters(), lr=1e-3),
    "whole parameters": lambda m: torch.optim.Adafactor(m.parameters(), lr=1e-3),
}


def clip(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.1)


def reading_hooks_body(context: Context, early: bool) -> dict[str, str]:
    """A hook before the step finds no gradients, and the error says so, whoever steps."""
    told = {}
    for name, make in KINDS.items():
        model = fresh()
        optimizer = make(model)
        handle = optimizer.register_step_pre_hook(clip) if early else None
        engine = zero.initialize(model, optimizer, zero.Config(timeout=20))
        handle = handle or optimizer.register_step_pre_hook(clip)
        engine.backward(language_loss(model, 0, context.rank))
        with pytest.raises(zero.UsageError) as raised:
            engine.step()
        told[name] = str(raised.value)
        handle.remove()
    return told


@pytest.mark.parametrize("early", [True, False])
def test_hooks_that_read_gradients_are_told_where_they_are(cluster: Clusters, early: bool) -> None:
    for told in cluster(2).run(reading_hooks_body, early=early):
        assert len(told) == len(KINDS)
        assert all("Config(clip_norm=...)" in message for message in told.values())


def wrapped(optimizer: Optimizer, called: list[int]) -> Optimizer:
    """Give an optimizer a step of its own, such as a warm-up wrapped around it."""
    inner = optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        called.append(len(called))
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * len(called)
        return inner(*args, **kwargs)

    optimizer.step = step  # type: ignore[method-assign]
    return optimizer


def wrapped_body(context: Context) -> tuple[list[int], bool, str]:
    states = []
    called: list[int] = []
    for by_hand in (False, True):
        model = fresh()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        engine = zero.initialize(
            model, optimizer if by_hand else wrapped(optimizer, called), zero.Config(timeout=20)
        )
        for step in range(3):
            if by_hand:
                optimizer.param_groups[0]["lr"] = 1e-3 * (step + 1)
            one_step(context, engine, step)
        states.append(engine.state_dict())
    wrapped(optimizer, [])
    engine.backward(language_loss(model, 3, context.rank))
    with pytest.raises(zero.OptimizerError) as raised:
        engine.step()
    alike = all(torch.allclose(value, states[1][name]) for name, value in states[0].items())
    return called, alike, str(raised.value)


def test_a_step_of_ones_own_is_called_or_refused(cluster: Clusters) -> None:
    for called, alike, message in cluster(2).run(wrapped_body):
        assert called == [0, 1, 2]
        assert alike
        assert "SGD was replaced after zero.initialize" in message


LATE: dict[str, tuple[Callable[[nn.Module], Optimizer], str]] = {
    "amsgrad": (lambda m: torch.optim.AdamW(m.parameters()), "amsgrad=True"),
    "dampening": (lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9), "dampening=True"),
    "momentum": (lambda m: torch.optim.SGD(m.parameters(), lr=0.1), "momentum=True"),
}


def late_option_body(context: Context, name: str) -> str:
    """An option that the kernel lacks is refused and changes nothing; without it, training continues."""
    model = fresh()
    engine = zero.initialize(model, LATE[name][0](model), zero.Config(timeout=20))
    (group,) = engine.optimizer.param_groups
    before, group[name] = group[name], True
    engine.backward(language_loss(model, 0, context.rank))
    with pytest.raises(zero.OptimizerError) as caught:
        engine.step()
    group[name] = before
    assert engine.step()
    return str(caught.value)


@pytest.mark.parametrize("name", LATE)
def test_options_that_come_late_are_refused(cluster: Clusters, name: str) -> None:
    for message in cluster(2).run(late_option_body, name=name):
        assert f"{LATE[name][1]} was set after zero.initialize" in message


def scheduler_body(context: Context) -> dict[str, Any]:
    """The optimizer object stays the user's: schedulers, hooks, param_groups."""
    model = Stack()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    before = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    engine = zero.initialize(model, optimizer, zero.Config(timeout=10))
    after = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, total_iters=4)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    rates, moved = [], []

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # schedulers warn when they miss optimizer.step()
        for step in range(3):
            start = engine.full_master("blocks.0.up.bias")
            rates.append(optimizer.param_groups[0]["lr"])
            train_on(engine, model(features(step, context.rank, model), STRAIGHT).loss)
            before.step()
            moved.append((engine.full_master("blocks.0.up.bias") - start).abs().max().item())
        after.step()
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.param_groups[0]["weight_decay"] = 0.0
    frozen = engine.full_master("blocks.0.up.bias")
    more = {"params": [nn.Parameter(torch.ones(2))]}
    with pytest.raises(zero.OptimizerError) as added:
        optimizer.add_param_group(more)
    optimizer.param_groups.append({**optimizer.param_groups[0], **more})
    engine.backward(model(features(9, context.rank, model), STRAIGHT).loss)
    try:
        engine.step()
        refused = ""
    except zero.OptimizerError as error:
        refused = str(error)
    del optimizer.param_groups[1]
    engine.step()
    return {
        "refused": refused,
        "added": str(added.value),
        "same object": engine.optimizer is optimizer,
        "rates": rates,
        "moved": moved,
        "calls": calls[:4],
        "lr 0": torch.equal(frozen, engine.full_master("blocks.0.up.bias")),
    }


def test_the_optimizer_stays_the_users(cluster: Clusters) -> None:
    for found in cluster(2).run(scheduler_body):
        assert found["same object"]
        assert "different parameters than at zero.initialize" in found["refused"]
        assert "may be frozen" in found["added"]
        assert found["rates"] == pytest.approx([1.0, 1 / 2, 1 / 3])
        assert found["moved"][0] > 0.9  # Adam's first step is as long as the learning rate
        assert found["calls"] == ["pre", "post", "pre", "post"]
        assert found["lr 0"]
