"""A stack of wide layers, whose state is worth placing, and a step of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

import zero
from tests.zero.helpers.loops import train_on

WIDTH, LAYERS, BATCH = 128, 8, 64


def build(sizes: Sequence[int] = (1,) * LAYERS) -> nn.Module:
    """sizes: of each layer, in squares."""
    torch.manual_seed(0)
    return nn.Sequential(*map(_layer, sizes))


def _layer(size: int) -> nn.Module:
    if size == 1:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    return nn.Sequential(nn.Linear(WIDTH, size * WIDTH // 2), nn.Tanh(), nn.Linear(size * WIDTH // 2, WIDTH))


def one_step(engine: zero.Engine, step: int, batch: int = BATCH, scale: float = 1.0) -> float:
    generator = torch.Generator().manual_seed(100 * step + engine.rank)
    x = (scale * torch.randn(batch, WIDTH, generator=generator)).to(engine.accelerator.device)
    loss = engine(x).float().square().mean()
    train_on(engine, loss)
    return loss.item()
