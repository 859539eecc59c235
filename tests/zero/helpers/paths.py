"""A stack of blocks and the ways through it, and blocks of which a part is used only sometimes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.zero.helpers.models import WIDTH, Block, Stack, features
from tests.zero.helpers.training import Run, relative_error, state_error

STRAIGHT = (0, 1, 2, 3)


def straight(model: nn.Module, step: int, rank: int) -> Tensor:
    return model(features(step, rank, model), STRAIGHT).loss


def decaying(model: nn.Module) -> Optimizer:
    """An optimizer whose weight decay tells skipped parameters from those stepped with a zero gradient."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.3)


def fresh(frozen: int | None = 1) -> Stack:
    torch.manual_seed(5)
    return Stack(frozen=frozen)


def error_of(run: Run, reference: Run) -> float:
    """The largest error of losses and, on the rank that has them, of weights."""
    losses = relative_error(run.losses, reference.losses)
    return max(losses, state_error(run.state, reference.state)) if run.state else losses


class Optional(nn.Module):
    """A block with a part that is used only if the batch says so."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(WIDTH)
        self.extra = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, use_extra: bool) -> Tensor:
        return self.block(x) + self.extra(x) if use_extra else self.block(x)


class Optionals(nn.Module):
    """gain: a parameter so small that it may be kept whole on all ranks."""

    def __init__(self, shape: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Optional() for _ in range(5))
        self.first = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(1))
        self.shape = shape

    def forward(self, x: Tensor, use_extra: bool) -> Tensor:
        x = self.first(x)
        if self.shape == "side by side":
            x = torch.stack([layer(x, use_extra) for layer in self.layers]).sum(0)
        for layer in self.layers if self.shape != "side by side" else ():
            if self.shape == "after one thrown away":
                layer(x, False)
            x = layer(x, use_extra)
        if self.shape == "twice":
            for layer in self.layers:
                x = layer(x, False)
        return (x * self.gain if use_extra else x).square().mean()


def optional_loss(model: nn.Module, step: int, rank: int) -> Tensor:
    return model(features(step, rank, model), use_extra=(step + rank) % 3 == 0)


def plain_loss(model: nn.Module, step: int, rank: int) -> Tensor:
    return model(features(step, rank, model))
