"""Parameters that are changed beside the engine: in a forward, in `zero.gathered`, where they are frozen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.models import WIDTH, features

STEPS = 3


class Careless(nn.Module):
    """Changes its own weights in its forward. how: in what way, None for not at all."""

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
        loss = functional.mse_loss(
            engine(features(step, 0, engine.module)), features(-step, 0, engine.module)
        )
        engine.backward(loss)
        engine.step()
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
        ):  # where ranks have memory in common they all have what was written
            engine.load_state_dict(whole)
        assert how == "frozen" or train(engine, context) == expected
    return found


def test_a_forward_that_changes_its_weights_is_refused(cluster: Clusters) -> None:
    for found in cluster(2).run(forward_body):
        replaced = "other memory than the engine's is behind {}. It was replaced: "
        assert found["data"].startswith(replaced.format("0.linear.weight"))
        assert found["frozen"].startswith(replaced.format("0.linear.bias"))
        assert found["in place"].startswith(
            "the forward writes to parameter '0.linear.bias', which is sharded"
        )
        assert found["max_norm"].startswith(
            "the forward writes to parameter '0.table.weight', which is sharded"
        )


def resident_body(context: Context) -> bool:
    """In place, in fp32, on every rank alike: the values of plain training."""
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
