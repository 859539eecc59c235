"""A model in parts, for pipelines of two ranks, and what one process trains."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleZBVZeroBubble

from tests.zero.helpers.optimizers import sgd

RANKS, STEPS, WIDTH, ROWS, MICRO_BATCHES, LAYERS, CLIP = 4, 3, 6, 8, 4, 4, 0.05


class Part(nn.Module):
    """Some layers of a model, under the names that they have in all of it."""

    def __init__(self, first: int, count: int) -> None:
        super().__init__()
        torch.manual_seed(4)
        layers = {str(i): nn.Linear(WIDTH, WIDTH) for i in range(LAYERS)}
        self.layers = nn.ModuleDict({str(i): layers[str(i)] for i in range(first, first + count)})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = torch.tanh(layer(x))
        return x


def rows(step: int, rank: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def reference() -> tuple[list[list[float]], list[float], dict[str, Tensor]]:
    """Losses by step and data rank, norms, and final weights of one process."""
    model = Part(0, LAYERS)
    optimizer = sgd(model)
    losses, norms = [], []
    for step in range(STEPS):
        each = [loss_of(model(rows(step, rank)), torch.ones(ROWS, WIDTH)) for rank in range(2)]
        torch.stack(each).mean().backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append([loss.item() for loss in each])
    return losses, norms, {name: value.detach() for name, value in model.state_dict().items()}


def numbers_of(kind: Any, number: int) -> list[int]:
    """The stages that a rank has, by its number in the pipeline."""
    if kind is ScheduleZBVZeroBubble:  # there and back
        return [number, 3 - number]
    return [number] if kind in (ScheduleGPipe, Schedule1F1B) else [number, number + 2]
