"""Chains of modules, their batches, and the gradients of the plain model to compare with."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.zero.helpers.models import device_of

WIDTH = 16
Loss = Callable[[nn.Module, Tensor], Tensor]


class Slotted:
    """An output of an unknown class."""

    __slots__ = ("value",)

    def __init__(self, value: Tensor) -> None:
        self.value = value

    def __call__(self) -> Tensor:
        return self.value


def plain(model: nn.Module, x: Tensor) -> Tensor:
    value = model(x)
    return (value() if isinstance(value, Slotted) else value).square().mean()


def chain(kind: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(kind() for _ in range(3)))


def batch(rank: int, device: torch.device) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(rank)).to(device)


def averaged(model: nn.Module, loss: Loss, ranks: int) -> dict[str, Tensor]:
    """Gradients of the plain model, averaged over all ranks' batches."""
    for rank in range(ranks):
        (loss(model, batch(rank, device_of(model))) / ranks).backward()
    return {name: p.grad for name, p in model.named_parameters()}
