"""Graphs that are partly on the host: by itself, autograd runs their backward in two threads."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero
from accelz.conformance.cluster import Clusters, Context


class Block(nn.Module):
    """Returns activations on the device, and a part of the loss on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.side = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x + torch.tanh(self.mix(x))
        return y, self.side(x).mean(0).cpu()


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        sides = []
        for block in self.blocks:
            x, side = block(x)
            sides.append(torch.tanh(side).square().sum())
        return x.square().mean() + torch.stack(sides).sum().to(x.device)


def fresh() -> Mixed:
    torch.manual_seed(0)
    return Mixed()


def losses_of(step: Any, device: torch.device, rank: int) -> list[float]:
    found = []
    for number in range(6):
        generator = torch.Generator().manual_seed(10 * number + rank)
        found.append(step(torch.randn(8, 16, generator=generator).to(device)))
    return found


def parity_body(context: Context) -> dict[str, list[float]]:
    """Gathers and reductions take time in the backward, in which the other thread of it goes on."""
    device, collectives = context.accelerator.device, context.accelerator.collectives
    size, rank = context.group.size, context.group.rank
    model = fresh()
    engine = zero.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), zero.Config(prefetch=0))
    slow = {name: getattr(collectives, name) for name in ("all_gather", "reduce_scatter")}

    def step(x: Tensor) -> float:
        loss = engine(x)
        for name, call in slow.items():
            setattr(collectives, name, lambda *a, call=call, **k: (time.sleep(0.05), call(*a, **k))[1])
        try:
            engine.backward(loss)
        finally:
            for name in slow:
                delattr(collectives, name)
        engine.step()
        return loss.item()

    whole = fresh().to(device)
    plain = torch.optim.AdamW(whole.parameters(), lr=1e-2)

    def reference(x: Tensor) -> float:
        loss = whole(x)
        loss.backward()
        for p in whole.parameters():
            assert p.grad is not None
            collectives.all_reduce(p.grad, context.group)
            p.grad /= size
        plain.step()
        plain.zero_grad()
        return loss.item()

    return {"sharded": losses_of(step, device, rank), "plain": losses_of(reference, device, rank)}


@pytest.mark.parametrize("ranks", [1, 2])
def test_training_is_that_of_the_whole_model(cluster: Clusters, ranks: int) -> None:
    for found in cluster(ranks).run(parity_body, limit=90):
        assert found["sharded"] == pytest.approx(found["plain"], rel=1e-5)
