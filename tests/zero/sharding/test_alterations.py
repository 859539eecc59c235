"""Parameters changed behind the engine's back: in a forward, in `zero.gathered`, and frozen ones."""

from __future__ import annotations

import copy
import warnings
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.loops import train_on
from tests.zero.helpers.models import WIDTH, device_of, features

STEPS = 3


class Careless(nn.Module):
    """A module that changes its own weights in its forward. how: in which way; None for not at all."""

    def __init__(self, how: str | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.table = nn.Embedding(WIDTH, WIDTH, max_norm=0.5 if how == "max_norm" else None)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "data":
            self.linear.weight.data = self.linear.weight.data * 0.9
        if self.how == "in place":
            with torch.no_grad():
                self.linear.bias.clamp_(-0.1, 0.1)
        if self.how == "frozen":
            self.linear.bias.data = self.linear.bias.data + 1
        return torch.tanh(self.linear(x) + self.table(torch.arange(len(x), device=x.device)))


def careless(how: str | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(Careless(how) for _ in range(3)))
    model[1].linear.bias.requires_grad_(how != "frozen")
    return model


def build(model: nn.Module, **config: Any) -> zero.Engine:
    trained = [p for p in model.parameters() if p.requires_grad]
    return zero.initialize(model, torch.optim.SGD(trained, lr=0.3), zero.Config(timeout=20, **config))


def train(engine: zero.Engine, context: Context) -> list[float]:
    losses = []
    for step in range(STEPS):
        output = engine(features(step, 0, engine.module)).float()  # torch 2.11 takes no two dtypes below
        loss = functional.mse_loss(output, features(-step, 0, engine.module))
        train_on(engine, loss)
        losses.append(loss.item())
    return losses


def forward_body(context: Context) -> dict[str, Any]:
    expected, found = train(build(careless()), context), {}
    for how in ("data", "frozen", "in place", "max_norm"):
        model = careless(how)
        engine = build(model)
        whole = engine.state_dict()
        for gradients in (True, False):
            with pytest.raises(zero.ModelError) as caught, torch.set_grad_enabled(gradients):
                engine(features(0, 0, model))
            assert all(unit.idle and not unit.in_use for unit in engine.units)
            found[how] = str(caught.value)
        for module in model:
            module.how, module.table.max_norm = None, None
        if how in (
            "in place",
            "max_norm",
        ):  # where ranks share memory, all of them have what was written
            engine.load_state_dict(whole)
        assert how == "frozen" or train(engine, context) == expected
    return found


def test_a_forward_that_changes_its_weights_is_refused(cluster: Clusters) -> None:
    for found in cluster(2).run(forward_body):
        replaced = "the memory of {} is no longer the engine's. It was replaced by "
        assert found["data"].startswith(replaced.format("0.linear.weight"))
        assert found["frozen"].startswith(replaced.format("0.linear.bias"))
        assert found["in place"].startswith(
            "the forward writes to parameter '0.linear.bias', which is sharded"
        )
        assert found["max_norm"].startswith(
            "the forward writes to parameter '0.table.weight', which is sharded"
        )


def resident_body(context: Context) -> bool:
    """Weights changed in place, in fp32 and alike on every rank, give the values of plain training."""
    plain = careless("in place")
    engine, optimizer, losses = (
        build(careless("in place"), stage=2),
        torch.optim.SGD(plain.parameters(), lr=0.3),
        [],
    )
    for step in range(STEPS):
        loss = functional.mse_loss(plain(features(step, 0, plain)), features(-step, 0, plain))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return train(engine, context) == pytest.approx(losses, rel=1e-4)


def test_whole_weights_may_be_changed_on_every_rank_alike(cluster: Clusters) -> None:
    assert all(cluster(2).run(resident_body))


def assigned_body(context: Context, stage: int, precision: str) -> dict[str, Any]:
    """`.data = ...` inside `zero.gathered`, as when adapters are merged or weights averaged."""
    model = careless()
    engine = build(model, stage=stage, precision=precision)
    found: dict[str, Any] = {}

    def fill(value: float) -> None:
        for parameter in model.parameters():
            parameter.data = torch.full_like(parameter, value)

    def shown() -> set[float]:
        return {round(value.float().mean().item(), 3) for value in engine.state_dict().values()}

    with zero.gathered(model, write_rank=1):
        fill(0.5 if context.rank == 1 else 77.0)
    found["written"] = shown()
    found["master"] = engine.full_master("0.linear.weight").unique().tolist()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with zero.gathered(model):
            before = {p: p.data for p in model.parameters()}
            fill(0.25)
            for parameter, values in before.items():
                parameter.data = values
            model[0].linear.weight.data = model[0].linear.weight.data.clone()
        found["swapped back"] = [str(w.message) for w in told]
        with zero.gathered(model):
            fill(0.25)
            engine(features(0, 0, model))  # with what is shown
        found["told"] = [str(w.message) for w in told]
    wrong = pytest.raises(
        zero.ModelError, match=r"parameter '1\.linear\.weight' was .* Resize embeddings, .* before zero\.init"
    )
    with wrong, zero.gathered(model, write_rank=0):
        model[0].linear.weight.data = torch.zeros_like(model[0].linear.weight)
        model[1].linear.weight.data = model[1].linear.weight.data[:3].clone()
    with zero.gathered(model[1].linear.weight, write_rank=0), zero.gathered(model[1]):
        model[1].linear.weight.data = model[1].linear.weight.data.clone()
    found["kept"] = shown()
    plain = careless()
    plain.load_state_dict({n: p.float() for n, p in engine.state_dict().items()} or plain.state_dict())
    expected, got = plain(features(0, 0, plain)), engine(features(0, 0, model)).float().cpu()
    found["computes"] = context.rank > 0 or torch.allclose(got, expected, atol=1e-2)
    engine.load_state_dict(careless().state_dict())
    other = build(careless(), stage=stage, precision=precision)
    found["trains"] = train(engine, context) == train(other, context)
    return found


@pytest.mark.parametrize(("stage", "precision"), [(2, "fp32"), (3, "fp32"), (3, "bf16")])
def test_data_assigned_in_a_block_is_written_or_told(cluster: Clusters, stage: int, precision: str) -> None:
    for rank, found in enumerate(cluster(2).run(assigned_body, stage=stage, precision=precision)):
        assert found["written"] == found["kept"] == (set() if rank else {0.5})
        assert found["master"] == [0.5]
        assert found["swapped back"] == []
        assert len(found["told"]) == 1
        assert "0.linear.weight, 0.linear.bias, " in found["told"][0]
        assert "pass write_rank=" in found["told"][0]
        assert found["computes"]
        assert found["trains"]


def resized_body(context: Context, stage: int) -> dict[str, str]:
    """What a program is told that resizes an embedding as transformers does, and then as it is told to."""
    model = careless()
    engine = build(model, stage=stage)
    table, found = model[0].table, {}

    def told(block: AbstractContextManager[None]) -> str:
        with warnings.catch_warnings(action="error"), pytest.raises(zero.ZeroError) as caught, block:
            table.weight.data = torch.cat([table.weight.data, table.weight.data[:2]])
        return str(caught.value)

    if stage == 3:
        found["at once"] = told(nullcontext())
    found["read only"] = told(zero.gathered(model))
    found["written"] = told(zero.gathered(model, write_rank=0))
    train(engine, context)
    model[1].table.weight = nn.Parameter(torch.zeros(WIDTH + 2, WIDTH, device=device_of(model)))
    with pytest.raises(zero.ModelError) as caught:
        train(engine, context)
    return {**found, "replaced": str(caught.value)}


@pytest.mark.parametrize("stage", [2, 3])
def test_whoever_resizes_too_late_is_sent_before_initialize(cluster: Clusters, stage: int) -> None:
    for found in cluster(2).run(resized_body, stage=stage):
        for message in found.values():
            assert "esize embeddings" in message
            assert "before zero.initialize" in message
            assert "write_rank" not in message


class Momentum(nn.Module):
    """MoCo's two encoders (He et al., 2020), of which the frozen one follows the other."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.key = copy.deepcopy(self.query).requires_grad_(False)

    @torch.no_grad()
    def follow(self) -> None:
        for query, key in zip(self.query.parameters(), self.key.parameters(), strict=True):
            key.data = key.data * 0.9 + query.data * 0.1

    def forward(self, x: Tensor) -> Tensor:
        self.follow()
        return functional.mse_loss(self.query(x), self.key(x.flip(0)))


def frozen_body(context: Context, stage: int, path: str) -> dict[str, bool]:
    torch.manual_seed(0)
    model = Momentum()
    plain = copy.deepcopy(model)
    engine = build(model, stage=stage)
    optimizer, found = torch.optim.SGD(plain.query.parameters(), lr=0.3), {}

    def step(index: int) -> None:
        train_on(engine, model(features(index, 0, model)))
        optimizer.zero_grad()
        plain(features(index, 0, plain)).backward()
        optimizer.step()

    def same(state: dict[str, Tensor]) -> bool:
        expected = plain.state_dict()
        return all(torch.allclose(v.cpu(), expected[n], atol=1e-5) for n, v in state.items())

    for index in range(3):
        step(index)
    found["one parameter"] = same({"key.0.weight": engine.full_master("key.0.weight")})
    step(3)
    found["state"] = same(engine.state_dict())
    step(4)
    engine.save_checkpoint(path)
    with torch.no_grad(), zero.gathered(model, write_rank=0):
        for parameter in model.parameters():
            parameter.zero_()
    found["written"] = not any(value.any() for value in engine.state_dict().values())
    engine.load_checkpoint(path)
    found["saved"] = same(engine.state_dict())
    step(5)
    with zero.gathered(model):
        model.follow()
        plain.follow()
    found["in a block"] = same(engine.state_dict())
    model.key[0].weight.data = model.key[0].weight.data.half()
    with pytest.raises(
        zero.ModelError, match=r"parameter 'key\.0\.weight' was .*float32.* was given values of .*float16"
    ):
        engine.state_dict()
    return found


@pytest.mark.parametrize("stage", [0, 2])
def test_frozen_parameters_may_be_trained_by_the_program(
    cluster: Clusters, stage: int, tmp_path: Path
) -> None:
    for found in cluster(2).run(frozen_body, stage=stage, path=str(tmp_path / "saved")):
        assert all(found.values()), found


class LowRank(nn.Module):
    """Adds to a frozen parameter what it learns, as an adapter on a parameter that no layer holds does.

    writes: the forward also changes the frozen values.
    """

    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5, requires_grad=False)
        self.up, self.down = (nn.Parameter(torch.randn(WIDTH, 2) / WIDTH) for _ in range(2))
        self.writes = writes

    def forward(self, x: Tensor) -> Tensor:
        if self.writes:
            self.experts.mul_(0.5)
        parametrize.register_parametrization(self, "experts", Added(self.up, self.down))
        try:
            return torch.tanh(x @ self.experts)
        finally:
            parametrize.remove_parametrizations(self, "experts", leave_parametrized=False)


class Added(nn.Module):
    def __init__(self, up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.change = lambda: up @ down.T

    def forward(self, values: Tensor) -> Tensor:
        return values + self.change()


def parametrized_body(context: Context, recomputed: bool) -> tuple[bool, str]:
    runs = []
    for stage in (0, 3):
        torch.manual_seed(0)
        model = nn.Sequential(*(LowRank(writes=False) for _ in range(3)))
        if recomputed:
            for module in model:
                module.forward = partial(checkpoint, module.forward, use_reentrant=False)
        runs.append(train(build(model, stage=stage), context))
    writing = build(nn.Sequential(*(LowRank(writes=True) for _ in range(3))))
    with pytest.raises(zero.ModelError, match="writes to parameter") as caught:
        writing(features(0, 0, writing.module))
    return runs[0] == runs[1], str(caught.value)


@pytest.mark.parametrize("recomputed", [False, True])
def test_a_forward_may_parametrize_what_it_does_not_change(cluster: Clusters, recomputed: bool) -> None:
    for same, told in cluster(2).run(parametrized_body, recomputed=recomputed):
        assert same
        assert "0.experts" in told
