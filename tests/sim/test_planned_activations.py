"""`zero.plan(batch=...)` predicts the peaks that a device counts, activations included."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.sim.layers import peak_of
from tests.zero.helpers.training import collected

WIDTH, VOCABULARY, ROWS, LENGTH = 64, 512, 8, 32
SCALARS = 4 * 1024  # bytes of the inputs, and of scalars
GATHERING = 0.04  # more is planned: what is gathered is counted as if it stayed a little longer
SETTINGS: list[dict[str, Any]] = [
    {"precision": "bf16"},
    {"stage": 2},
    {"precision": "bf16", "offload": {"optimizer": "host", "params": "host"}},
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """recompute: how blocks are checkpointed; "" for not."""

    def __init__(self, recompute: str) -> None:
        super().__init__()
        self.recompute = recompute
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.recompute:
                x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant")
            else:
                x = block(x)
        return {"loss": self.head(x).float().square().mean()}


@collected()
def measured_body(context: Context, recompute: str) -> None:
    accelerator = context.accelerator
    tokens = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    given = tokens.to(accelerator.device)
    for settings in SETTINGS:
        model, config = Model(recompute), zero.Config(timeout=20, **settings)
        optimizer = torch.optim.AdamW(model.parameters())
        memory = zero.plan(model, optimizer, config, ranks=context.size, batch=tokens).memory
        gc.collect()
        before = accelerator.memory.stats().allocated
        engine = zero.initialize(model, optimizer, config)
        for _ in range(3):
            forward, output = peak_of(accelerator, partial(engine, given))
            backward, _ = peak_of(accelerator, partial(engine.backward, output["loss"]))
            engine.step()
            del output
        for phase, peak in {"forward": forward - before, "backward": backward - before}.items():
            gathers = context.size > 1 or "offload" in settings
            planned, slack = memory.total(phase), GATHERING * peak if gathers else 0
            assert peak - SCALARS <= planned <= peak + SCALARS + slack, (settings, phase, planned, peak)
        del engine, model, optimizer


@pytest.mark.parametrize("recompute", ["", "reentrant", "no reentry"])
def test_peaks_are_those_that_are_planned(sim: Clusters, recompute: str) -> None:
    for size in (1, 2):
        sim(size).run(measured_body, recompute=recompute)
