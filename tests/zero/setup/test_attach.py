"""`zero.initialize(model)` without an optimizer, and `engine.attach(optimizer)` afterwards."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.models import fresh, language_loss
from tests.zero.helpers.optimizers import sgd
from tests.zero.helpers.training import adamw
from zero.drafts.checks import how_stepped
from zero.optimizer.joint import joint

Make = Callable[[nn.Module], Any]


def muon(model: nn.Module) -> Any:
    matrices = [p for p in model.parameters() if p.requires_grad and p.dim() == 2 and p.numel()]
    return torch.optim.Muon(matrices, lr=1e-3)


def adafactor(model: nn.Module) -> Any:
    return torch.optim.Adafactor(model.parameters(), lr=1e-3)


def rmsprop(model: nn.Module) -> Any:
    return torch.optim.RMSprop(model.parameters(), lr=1e-3)


def adagrad(model: nn.Module) -> Any:
    """It has state from the start."""
    return torch.optim.Adagrad(model.parameters(), lr=1e-2, initial_accumulator_value=0.125)


def two(model: nn.Module) -> Any:
    parameters = list(model.parameters())
    return [torch.optim.AdamW(parameters[::2], lr=1e-3), torch.optim.SGD(parameters[1::2], lr=1e-2)]


def muon_and_adamw(model: nn.Module) -> Any:
    one = muon(model)
    matrices = set(one.param_groups[0]["params"])
    return [one, torch.optim.AdamW([p for p in model.parameters() if p not in matrices], lr=1e-3)]


def trained(
    context: Context, make: Make, late: bool, path: str = "", **settings: Any
) -> tuple[list[float], dict[str, Tensor]]:
    model, losses = fresh(), []
    config = zero.Config(timeout=20, **settings)
    if late:
        engine = zero.initialize(model, config=config)
        with torch.no_grad():
            losses.append(float(language_loss(model, 7, context.rank)))
        optimizer = make(model)
        engine.attach(optimizer)
    else:
        optimizer = make(model)
        engine = zero.initialize(model, optimizer, config)
        with torch.no_grad():
            losses.append(float(language_loss(model, 7, context.rank)))
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    for step in range(3):
        loss = language_loss(model, step, context.rank)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for each in optimizers:
            each.step()
        for each in optimizers:
            each.zero_grad()
        losses.append(float(loss.detach()))
    assert engine.steps == 3
    if path:
        engine.save_checkpoint(path)
        assert engine.load_checkpoint(path).steps == 3
    state = engine.full_optimizer_state("embedding.weight")
    return losses, engine.state_dict() | state


HOST = zero.Offload(optimizer="host", gradients="host")
DISK = zero.Offload(optimizer="disk", params="disk", path=tempfile.gettempdir())
IN_PARTS = zero.Offload(optimizer="host", sub_group_size=64)
STREAMED = zero.Offload(optimizer="host", step="device")
RUNS: dict[str, tuple[Make, dict[str, Any]]] = {
    "stage 0": (adamw, {"stage": 0}),
    "stage 1": (adamw, {"stage": 1}),
    "stage 3": (adamw, {}),
    "16 bits": (adamw, {"precision": "bf16"}),
    "SGD": (sgd, {"precision": "bf16"}),
    "slices": (rmsprop, {}),
    "state from the start": (adagrad, {}),
    "state from the start, at 16 bits": (adagrad, {"precision": "bf16"}),
    "whole parameters": (adafactor, {}),
    "some parameters": (muon, {"stage": 2}),
    "host": (adamw, {"offload": HOST}),
    "streamed": (adamw, {"offload": STREAMED, "precision": "bf16"}),
    "copies": (adamw, {"shard_ranks": 2}),
    "compiled": (adamw, {"compile": zero.Compile(inner="aot_eager")}),
    "measured": (adamw, {"offload": "auto"}),
    "two optimizers": (two, {"precision": "bf16"}),
    "two of which one steps whole parameters": (muon_and_adamw, {}),
    "two, on tiers": (two, {"precision": "bf16", "offload": HOST, "stage": 2}),
    "SGD, on disk": (sgd, {"offload": DISK}),
    "whole parameters, in several records": (adafactor, {"offload": IN_PARTS}),
    "two, on disk": (two, {"precision": "bf16", "offload": DISK}),
}


def late_body(context: Context, run: str, path: str) -> dict[str, float]:
    make, settings = RUNS[run]
    losses, state = trained(context, make, late=True, path=path, **settings)
    expected, other = trained(context, make, late=False, **settings)
    off = {
        name: float((value.double() - other[name].double()).abs().max())
        for name, value in state.items()
        if isinstance(value, Tensor) and value.numel()
    }
    off["losses"] = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    return {name: value for name, value in off.items() if value > 1e-6}


ON_THE_HOST = (
    *("stage 0", "stage 1", "SGD", "slices", "whole parameters", "some parameters", "copies", "compiled"),
    "two optimizers",
)
"""Runs in which attaching does nothing else on another device than in the other runs."""


def _of(run: str) -> Any:
    marks = [pytest.mark.host] * (run in ON_THE_HOST) + [pytest.mark.slow] * (run == "compiled")
    return pytest.param(run, marks=marks)


@pytest.mark.parametrize("run", [_of(run) for run in RUNS])
def test_an_optimizer_that_comes_later_trains_the_same(cluster: Clusters, tmp_path: Path, run: str) -> None:
    workers = cluster(4 if run == "copies" else 2)
    assert workers.run(late_body, run=run, path=str(tmp_path / "saved"), limit=120) == [{}] * workers.size


SECOND: dict[str, tuple[Make, dict[str, Any]]] = {
    "stage 3": (sgd, {}),
    "16 bits": (adamw, {"precision": "bf16"}),
    "host": (adamw, {"precision": "bf16", "offload": HOST, "stage": 2}),
    "disk": (adamw, {"precision": "bf16", "offload": DISK}),
    "slices": (rmsprop, {}),
    "whole parameters": (muon_and_adamw, {"stage": 2}),
}


def steps(context: Context, model: nn.Module, optimizers: Any, of: range) -> None:
    for step in of:
        language_loss(model, step, context.rank).backward()
        for each in optimizers if isinstance(optimizers, list) else [optimizers]:
            each.step()
            each.zero_grad()


def second_body(context: Context, run: str) -> list[str]:
    """An engine that gets another optimizer trains as one that is made with its weights and that one."""
    make, settings = SECOND[run]
    config = zero.Config(timeout=20, **settings)
    model, fresh_one = fresh(), fresh()
    engine = zero.initialize(model, first := adamw(model), config)
    steps(context, model, first, range(2))
    language_loss(model, 2, context.rank).backward()  # of which nothing is left
    masters = engine.state_dict(master=True)
    if context.rank == 0:
        fresh_one.load_state_dict(masters)
    engine.attach(second := make(model))
    steps(context, model, second, range(3, 5))
    assert engine.steps == 4
    with pytest.raises(zero.UsageError, match=r"another one by engine\.attach"):
        first.step()
    expected = zero.initialize(fresh_one, anew := make(fresh_one), config)
    steps(context, fresh_one, anew, range(3, 5))
    found, wanted = engine.state_dict(master=True), expected.state_dict(master=True)
    return [name for name in wanted if not torch.equal(found[name], wanted[name])]


@pytest.mark.parametrize("run", SECOND)
def test_another_optimizer_takes_the_place_of_the_first(cluster: Clusters, run: str) -> None:
    assert cluster(2).run(second_body, run=run, limit=120) == [[], []]


def read_only_body(context: Context, path: str) -> None:
    """A model without an optimizer is read, saved and loaded; gradients go through it once it is frozen."""
    model, student = fresh(), nn.Linear(4, 4)
    engine = zero.initialize(model, config=zero.Config(timeout=20, precision="bf16"))
    expected = engine.state_dict(master=True)
    with zero.gathered(model):
        pass
    engine.offload_states()
    engine.reload_states()
    for backward in (lambda loss: loss.backward(), engine.backward):
        with pytest.raises(zero.UsageError, match=r"engine\.attach\(optimizer\)"):
            backward(language_loss(model, 0, context.rank))
    with pytest.raises(zero.UsageError, match="without backward"):
        engine.step()
    engine.zero_grad()
    trainable = [p for p in model.parameters() if p.requires_grad]
    model.requires_grad_(False)
    x = torch.ones(2, device=engine.device, requires_grad=True)
    (language_loss(model, 0, context.rank) * x.sum()).backward()
    assert x.grad is not None
    for parameter in trainable:
        parameter.requires_grad_(True)
    engine.save_checkpoint(path)
    engine.load_checkpoint(path)
    optimizer = adamw(model)
    with pytest.raises(zero.OptimizerError, match="not a parameter of the model"):
        engine.attach(torch.optim.SGD(student.parameters(), lr=0.1))
    engine.attach(optimizer)
    assert all(torch.equal(value, expected[name]) for name, value in engine.state_dict(master=True).items())
    with pytest.raises(zero.UsageError, match="has this optimizer already"):
        engine.attach(optimizer)
    with pytest.raises(zero.StateError, match="weights_only=True"):
        engine.load_checkpoint(path)
    engine.load_checkpoint(path, weights_only=True)
    language_loss(model, 0, context.rank).backward()
    optimizer.step()
    engine.save_checkpoint(path)


def test_a_model_without_an_optimizer_is_only_read(cluster: Clusters, tmp_path: Path) -> None:
    cluster(2).run(read_only_body, path=str(tmp_path / "saved"))


def refused_body(context: Context) -> None:
    """What attach refuses changes nothing: the engine takes another optimizer."""
    model = fresh()
    engine = zero.initialize(model, config=zero.Config(timeout=20))
    with pytest.raises(zero.RankMismatchError, match="the optimizer"):
        engine.attach(two(model) if context.rank else adamw(model))
    with pytest.raises(zero.RankMismatchError, match="the optimizer"):
        engine.attach(adamw(model) if context.rank else sgd(model))
    optimizer = adamw(model)
    engine.attach(optimizer)
    language_loss(model, 0, context.rank).backward()
    optimizer.step()
    assert engine.steps == 1


@pytest.mark.host
@pytest.mark.parametrize("make", [adamw, two, muon])
def test_what_ranks_compare_is_the_same_in_every_process(make: Make) -> None:
    assert " at 0x" not in how_stepped(joint(make(fresh())), zero.Config())


def test_refused_optimizers_change_nothing(cluster: Clusters) -> None:
    cluster(2).run(refused_body)
