"""`param.grad` between backward and step: instead of nothing, an object that says where the gradients are."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.models import fresh, language_loss
from tests.zero.helpers.training import adamw

USES: dict[str, Callable[[nn.Module], Any]] = {
    "clip_grad_norm_": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1.0),
    "clip_grad_norm_ one by one": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1.0, foreach=False),
    "clip_grad_value_": lambda m: nn.utils.clip_grad_value_(m.parameters(), 1.0),
    "a norm": lambda m: [p.grad.norm() for p in m.parameters() if p.grad is not None],
    "a copy": lambda m: [p.grad.detach().clone() for p in m.parameters() if p.grad is not None],
    "in place": lambda m: [p.grad.mul_(0.5) for p in m.parameters() if p.grad is not None],
    "zeros": lambda m: m.zero_grad(set_to_none=False),
    "an array": lambda m: [p.grad.numpy() for p in m.parameters() if p.grad is not None],
    "another memory": lambda m: [p.grad.cpu() for p in m.parameters() if p.grad is not None],
    "shared memory": lambda m: [p.grad.share_memory_() for p in m.parameters() if p.grad is not None],
    "a file": lambda m: torch.save([p.grad for p in m.parameters()], io.BytesIO()),
}


def uses_body(context: Context, config: dict[str, Any]) -> dict[str, str]:
    """The error of each use; training continues as if it had not been tried."""
    model, untouched = fresh(), fresh()
    engine, other = (
        zero.initialize(m, adamw(m), zero.Config(timeout=20, **config)) for m in (model, untouched)
    )
    said = {}
    for step, (name, use) in enumerate(USES.items()):
        losses = []
        for each in (engine, other):
            loss = language_loss(each.module, step, context.rank)
            each.backward(loss)
            losses.append(loss.item())
        assert losses[0] == losses[1]
        with pytest.raises(zero.UsageError) as raised:
            use(model)
        said[name] = str(raised.value)
        assert engine.step()
        assert other.step()
        assert all(p.grad is None for p in model.parameters())
    return said


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_what_needs_gradients_is_told_where_they_are(cluster: Clusters, stage: int) -> None:
    for said in cluster(2).run(uses_body, config={"stage": stage}):
        for message in said.values():
            assert "Config(clip_norm=...)" in message
            assert "engine.full_gradient(name)" in message


def scaler_body(context: Context) -> str:
    model = fresh()
    engine = zero.initialize(model, adamw(model), zero.Config(timeout=20))
    scaler = torch.amp.GradScaler("cpu")
    engine.backward(scaler.scale(language_loss(model, 0, context.rank)))
    with pytest.raises(zero.UsageError) as raised:
        scaler.step(engine.optimizer)
    return str(raised.value)


def test_a_grad_scaler_is_told_what_takes_its_place(cluster: Clusters) -> None:
    assert "Config(loss_scale='dynamic') instead of a GradScaler" in cluster(1).run(scaler_body)[0]


def pieces_body(context: Context, config: dict[str, Any]) -> str:
    """Clip through the optimizer's parameters, as training loops do that know only the optimizer."""
    model = fresh()
    engine = zero.initialize(model, adamw(model), zero.Config(timeout=20, **config))
    listed = [p for group in engine.optimizer.param_groups for p in group["params"]]
    engine.backward(language_loss(model, 0, context.rank))
    with pytest.raises(zero.UsageError) as raised:
        nn.utils.clip_grad_norm_(listed, 1.0)
    assert engine.step()
    assert all(p.grad is None for p in listed)
    engine.backward(language_loss(model, 1, context.rank))
    engine.zero_grad()
    assert all(p.grad is None for p in listed)
    return str(raised.value)


@pytest.mark.parametrize("config", [{"stage": 1}, {"stage": 3}, {"offload": zero.Offload(optimizer="host")}])
def test_the_optimizers_own_parameters(cluster: Clusters, config: dict[str, Any]) -> None:
    for message in cluster(2).run(pieces_body, config=config):
        assert "Config(clip_norm=...)" in message


LATE = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, weight_decay=0.5),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, weight_decay=0.5),
    "adamw one by one": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, weight_decay=0.5, foreach=False),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.1, weight_decay=0.5),
}


def late_optimizer_body(context: Context, stage: int) -> None:
    """An optimizer made after the engine is refused before it decays any weight."""
    model = fresh()
    engine = zero.initialize(model, adamw(model), zero.Config(timeout=20, stage=stage))
    for make in LATE.values():
        engine.backward(language_loss(model, 0, context.rank))
        before = engine.state_dict()
        with pytest.raises(
            zero.UsageError, match=r"`\.is_sparse` needs the values of a parameter's `\.grad`"
        ):
            make(model).step()
        after = engine.state_dict()
        assert all(torch.equal(value, after[name]) for name, value in before.items())
        assert engine.step()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_optimizer_made_later_does_not_step_in_silence(cluster: Clusters, stage: int) -> None:
    cluster(2).run(late_optimizer_body, stage=stage)


def places_body(context: Context) -> None:
    """They are there after the last micro-batch, for parameters that were used, with their shapes."""
    model = fresh()
    engine = zero.initialize(model, adamw(model), zero.Config(timeout=20, gradient_accumulation_steps=2))

    def with_gradient() -> set[str]:
        return {name for name, p in model.named_parameters() if p.grad is not None}

    engine.backward(language_loss(model, 0, context.rank))
    assert not with_gradient()
    engine.backward(language_loss(model, 1, context.rank))
    used = {n for n, p in model.named_parameters() if p.requires_grad and engine.full_gradient(n) is not None}
    assert with_gradient() == used
    assert used
    weight = model.blocks[0].up.weight
    assert isinstance(weight, nn.Parameter)
    assert repr(weight.grad).startswith("AbsentGradient(shape=(29, 12), dtype=torch.float32")
    assert (weight.grad.shape, weight.grad.dtype) == (weight.shape, weight.dtype)
    assert engine.step()
    assert not with_gradient()
    for _ in range(2):
        engine.backward(language_loss(model, 0, context.rank))
    assert with_gradient()
    with pytest.raises(zero.UsageError, match=r"engine\.backward"):
        language_loss(model, 0, context.rank).backward()
    engine.zero_grad()
    assert not with_gradient()


def test_where_they_are(cluster: Clusters) -> None:
    cluster(2).run(places_body)


def head_alone(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if "head" in name or "embed" in name:
            parameter.grad = None


def replaced(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.zeros(parameter.shape, device=parameter.device)


CHANGES: dict[str, Callable[[zero.Engine], None]] = {
    "some removed": lambda e: head_alone(e.module),
    "all removed": lambda e: e.module.zero_grad(),
    "replaced": lambda e: replaced(e.module),
    "by the optimizer": lambda e: e.optimizer.zero_grad(),
}


def changes_body(context: Context, stage: int) -> dict[str, str]:
    """Changes that the engine would ignore are refused and have no effect; training continues without."""
    model, untouched = fresh(), fresh()
    engine, other = (
        zero.initialize(m, adamw(m), zero.Config(timeout=20, stage=stage)) for m in (model, untouched)
    )
    told = {}
    for step, (name, change) in enumerate(CHANGES.items()):
        engine.backward(language_loss(model, 90 + step, context.rank))
        change(engine)
        with pytest.raises(zero.UsageError) as raised:
            engine.step()
        told[name] = str(raised.value)
        engine.zero_grad()
        for each in (engine, other):
            each.backward(language_loss(each.module, step, context.rank))
            assert each.step()
    state, expected = engine.state_dict(), other.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in state.items())
    return told


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_gradients_that_somebody_changes_are_not_stepped_in_silence(cluster: Clusters, stage: int) -> None:
    for told in cluster(2).run(changes_body, stage=stage):
        for message in told.values():
            assert "engine.zero_grad()" in message
        assert "head" in told["some removed"] or "embed" in told["some removed"]
        assert "blocks" not in told["some removed"]
        assert "blocks.0.up.weight" in told["replaced"]


class Products(nn.Module):
    """Three parameters of one unit, the second of which may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.ParameterList(torch.ones(4) for _ in range(3))

    def forward(self, x: torch.Tensor, skip: bool) -> torch.Tensor:
        for index, factor in enumerate(self.factors):
            x = x if skip and index == 1 else x * factor
        return x


def calls_body(context: Context, optimizer: str) -> list[int]:
    """Kernel calls for a unit's record in three steps; the second leaves out a parameter."""
    model = Products()
    made = {"SGD": torch.optim.SGD, "AdamW": torch.optim.AdamW}[optimizer](model.parameters(), lr=0.1)
    engine = zero.initialize(model, made, zero.Config(timeout=20))
    (owned,) = engine._boundary.optimizer.subs
    found = []
    for step in range(3):
        x = torch.ones(2, 4, device=context.accelerator.device)
        engine.backward(model(x, skip=step == 1).square().sum())
        found.append(len(list(owned.runs(owned.missing(next(iter(engine._reducer.all)).used)))))
        engine.step()
    return found


@pytest.mark.parametrize(("optimizer", "calls"), [("SGD", [1, 2, 1]), ("AdamW", [1, 2, 3])])
def test_only_step_counts_keep_pieces_apart(cluster: Clusters, optimizer: str, calls: list[int]) -> None:
    assert cluster(1).run(calls_body, optimizer=optimizer) == [calls]
