"""Parameters remain what they are to the user: the objects, with their hooks, marks, ties and strides."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero
from accelz import rebind
from accelz.conformance.cluster import Clusters, Context
from tests.zero.conftest import Abilities
from tests.zero.helpers.loops import train_on
from tests.zero.helpers.models import device_of
from tests.zero.helpers.training import relative_error

PRECISIONS = ("fp32", "bf16", "fp16")
STEPS = 3


class Odd(nn.Module):
    """Channels-last, tied, frozen, transposed and sliced parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.embedding = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.randn(5, 4).t(), requires_grad=False)
        self.turned = nn.Parameter(torch.randn(5, 4).t())
        self.sliced = nn.Parameter(torch.randn(4, 10)[:, ::2])

    def forward(self, x: Tensor) -> Tensor:
        y = self.image(x).mean((2, 3)) + self.embedding(torch.arange(2, device=x.device))
        across = y @ (self.turned + self.frozen + self.sliced)
        return self.head(y).float().square().mean() + across.float().square().mean()


def made() -> Odd:
    torch.manual_seed(0)
    return Odd()


def batch(step: int, on: nn.Module, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(2, 3, 6, 6, generator=generator).to(device_of(on), dtype)


def facts(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    return {
        name: (id(p), p.requires_grad, p.stride(), getattr(p, "mark", None))
        for name, p in model.named_parameters()
    }


def plain() -> list[float]:
    """Losses of the model without an engine on the host, in fp32."""
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(STEPS):
        loss = model(batch(step, model))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def identity_body(context: Context, stage: int, start: str) -> None:
    device, expected = context.accelerator.device, plain()
    for precision in PRECISIONS:
        model, calls = made(), []
        for parameter in model.parameters() if start == "device" else ():
            rebind(parameter, parameter.detach().to(device))
        model.turned.mark = "kept"  # type: ignore[attr-defined]
        model.turned.register_hook(lambda grad, calls=calls: calls.append("gradient"))
        model.turned.register_post_accumulate_grad_hook(lambda _, calls=calls: calls.append("accumulated"))
        before, strides = facts(model), [torch.empty_like(p).stride() for p in model.parameters()]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        engine = zero.initialize(
            model, optimizer, zero.Config(stage=stage, precision=precision, loss_scale=8.0, timeout=20)
        )
        losses = []
        for step in range(STEPS):
            loss = engine(batch(step, model, model.image.weight.dtype))
            train_on(engine, loss)
            losses.append(loss.item())
        with zero.gathered(model):
            for (name, now), stride in zip(facts(model).items(), strides, strict=True):
                assert now == (*before[name][:2], stride, before[name][3]), (precision, name)
            assert model.image.weight.is_contiguous(memory_format=torch.channels_last), precision
        assert model.head.weight is model.embedding.weight
        assert calls == ["gradient", "accumulated"] * STEPS, (precision, calls)
        assert relative_error(losses, expected) < (1e-5 if precision == "fp32" else 3e-2), precision


@pytest.mark.parametrize("start", ["host", "device"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_parameters_stay_what_they_are(cluster: Clusters, stage: int, start: str) -> None:
    cluster(2).run(identity_body, stage=stage, start=start)


def held_body(context: Context) -> dict[str, str]:
    """Parameters on the host that something besides the model holds.

    A device whose Parameters can be given host data accepts them; another says why it cannot, before anything
    has changed.
    """
    graph = nn.Linear(4, 4)
    outputs = [graph.weight.square().sum()]
    backward = nn.Linear(4, 4)
    losses = [backward(torch.ones(2, 4)).sum()]
    losses[0].backward()
    backward.zero_grad()
    kinds = {"weak": nn.LSTM(4, 4), "graph": graph, "old-style": _old_weight_norm(), "hook": nn.Linear(4, 4)}
    kinds["hook"].weight.register_hook(lambda gradient: gradient)
    said, device = {}, context.accelerator.device
    for name, model in kinds.items():
        before = facts(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            zero.initialize(model, optimizer, zero.Config(timeout=20))
            said[name] = "ok"
        except zero.ModelError as error:
            said[name] = str(error)
            assert facts(model) == before
            model(torch.ones(2, 4))  # whole, as it was
        assert outputs
        assert losses
    moved = nn.RNN(4, 4).to(device)
    engine = zero.initialize(moved, torch.optim.SGD(moved.parameters(), lr=0.1), zero.Config(timeout=20))
    engine.backward(engine(torch.ones(3, 4, device=device))[0].square().mean())
    assert engine.step()
    return said


def _old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.weight_norm(nn.Linear(4, 4))


def test_parameters_that_something_holds(cluster: Clusters, abilities: Abilities) -> None:
    (said,) = cluster(1).run(held_body)
    assert said["hook"] == "ok"
    if abilities.capabilities.host_data_assignment:
        assert set(said.values()) == {"ok"}
    else:
        assert "weak references" in said["weak"]
        assert "part of an autograd graph" in said["graph"]
        assert "part of an autograd graph" in said["old-style"]
        first = f"call model.to({abilities.device_type!r}) before"
        assert all(first in message for message in said.values() if message != "ok")


def buffers_body(context: Context) -> bool:
    """Rank 0's values win, even in dtypes that no collective library knows."""
    model = nn.Linear(4, 4)
    for number, dtype in enumerate((torch.float8_e4m3fn, torch.complex64, torch.bool, torch.uint16)):
        model.register_buffer(f"buffer{number}", torch.full((5,), 1 - context.rank).to(dtype))
    zero.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), zero.Config(timeout=20))
    return all(bool((b.cpu().to(torch.complex64) == 1).all()) for b in model.buffers())


def test_buffers_of_any_dtype_are_spread(cluster: Clusters) -> None:
    assert cluster(2).run(buffers_body) == [True, True]
