"""Parameters stay what they are to the user: the object, its hooks and marks, ties and strides."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero
from accelz.conformance.cluster import Clusters, Context
from accelz.flat_buffer import rebind
from tests.zero.models import device_of
from tests.zero.training import relative_error

PRECISIONS = ("fp32", "bf16", "fp16")
STEPS = 3


class Odd(nn.Module):
    """Channels-last, tied, frozen, turned and sliced parameters."""

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
    """Losses of the model by itself on the host, in fp32."""
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
            engine.backward(loss)
            engine.step()
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
