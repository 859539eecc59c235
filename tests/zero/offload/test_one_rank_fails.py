"""What only one rank runs into: too little memory, or a disk that fails. No rank is left waiting for it."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero
from accelz.accelerator import Accelerator
from accelz.conformance.cluster import Clusters, Context
from zero.second_try import SecondTry

WIDTH, LAYERS, BATCH = 128, 8, 64
SHORT_STEP = 4  # two steps measure, one has the records placed


class Hungry(nn.Module):
    """Wants more memory than is free for a moment, if told to, in forward or backward. Draws random numbers,
    and changes buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.2)
        self.wants = ""

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.norm(self.linear(x)))
        if self.wants == "forward":
            too_much(x.device)
        if self.wants == "backward" and x.requires_grad:
            device = x.device  # a hook that holds its own tensor would keep it for good
            x.register_hook(lambda _: too_much(device))
        return torch.tanh(x)


def too_much(device: torch.device) -> None:
    import accelz

    torch.empty(accelz.current().memory.stats().free + 4096, dtype=torch.uint8, device=device)


@contextmanager
def capacity(context: Context, nbytes: int) -> Iterator[None]:
    from accelz_sim import memory

    whole = context.accelerator.memory.stats().capacity
    memory.set_capacity(nbytes)
    try:
        yield
    finally:
        memory.set_capacity(whole)


def steps(context: Context, count: int, wants: str = "", offload: Any = None) -> dict[str, Any]:
    """Losses, peaks, and how many records are on the device behind each step."""
    gc.collect()
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
    layers[3] = Hungry()  # type: ignore[call-overload]
    model = nn.Sequential(*layers)
    context.accelerator.rng.seed(context.rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = zero.Config(precision="bf16", cast_buffers=True, offload=offload, timeout=20)
    engine = zero.initialize(model, optimizer, config)
    losses, peaks, near = [], [], []
    for step in range(count):
        layers[3].wants = wants if step == SHORT_STEP else ""  # type: ignore[assignment]
        context.accelerator.memory.reset_peak()
        generator = torch.Generator().manual_seed(100 * step + context.rank)
        x = torch.randn(BATCH, WIDTH, generator=generator).to(context.accelerator.device)
        loss = engine(x).float().square().mean()
        engine.backward(loss)
        engine.step()
        peaks.append(context.accelerator.memory.stats().peak)
        losses.append(loss.item())
        near.append([g.kept.tier for u in engine.units for g in u.groups])
    return {"losses": losses, "peaks": peaks, "near": near, "state": engine.state_dict(master=True)}


def shortage_body(context: Context, wants: str, ranks: tuple[int, ...]) -> dict[str, Any]:
    plain = steps(context, SHORT_STEP + 3)
    gc.collect()
    mine = wants if context.rank in ranks else ""
    with capacity(context, int(max(plain["peaks"]) * 0.8)), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        short = steps(context, SHORT_STEP + 3, mine, offload="auto")
    told = sum("ran out of memory" in str(w.message) for w in caught)
    return {"plain": plain["losses"], "short": short["losses"], "near": short["near"], "told": told}


@pytest.mark.parametrize("wants", ["forward", "backward"])
@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 1)])
def test_out_of_memory_on_some_ranks_is_repeated(
    cluster: Clusters, device: str, wants: str, ranks: tuple[int, ...]
) -> None:
    """Where no collective is: the others do not notice, and behind the step all have the same placement."""
    if device != "sim":
        pytest.skip("needs a device whose capacity can be set")
    found = cluster(2).run(shortage_body, wants=wants, ranks=ranks, limit=120)
    for rank, mine in enumerate(found):
        assert mine["short"] == pytest.approx(mine["plain"], rel=1e-3)
        assert mine["told"] == (rank in ranks)
        assert mine["near"] == found[0]["near"]
        assert "device" in mine["near"][SHORT_STEP - 1]
        assert mine["near"][SHORT_STEP].count("device") < mine["near"][SHORT_STEP - 1].count("device")
        assert "device" in mine["near"][SHORT_STEP]  # what has room comes back
        assert mine["near"][SHORT_STEP] == mine["near"][-1]


def random_body(context: Context) -> tuple[bool, bool]:
    """An operation that has drawn random numbers when it finds no room draws the same ones again."""
    accelerator: Accelerator = context.accelerator
    gc.collect()
    numel = 1 << 20
    x = torch.ones(numel, device=accelerator.device)
    accelerator.rng.seed(7)
    expected, _ = torch.native_dropout(x, 0.5, True)
    draws = torch.rand(4, device=accelerator.device)
    accelerator.rng.seed(7)
    ballast = [torch.empty(8 * numel, device=accelerator.device)]
    moved = []

    def make_room() -> int:
        moved.append(len(ballast))
        ballast.clear()
        return moved[-1]

    second_try = SecondTry(accelerator, make_room, lambda: bool(ballast))
    with capacity(context, accelerator.memory.stats().allocated + 3 * numel), second_try.on():
        found, _ = torch.native_dropout(x, 0.5, True)
    again = torch.rand(4, device=accelerator.device)
    return moved == [1], torch.equal(found, expected) and torch.equal(draws, again)


def test_a_repeated_operation_draws_the_same_numbers(cluster: Clusters, device: str) -> None:
    if device != "sim":
        pytest.skip("needs a device whose capacity can be set")
    assert cluster(1).run(random_body) == [(True, True)]
