"""A script in the manner of nanochat: Muon for the matrices and AdamW for the rest, schedules written into
param_groups, micro-batches added up, gradients dropped by `model.zero_grad`, and weights saved whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F

import zero
from accelz.conformance.cluster import Clusters, Context

WIDTH, WORDS, MICROS, STEPS = 32, 40, 2, 5
CLOSE = 1e-4  # of losses near 4: Muon iterates in bf16, where last bits count, and processors differ in them


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(2 * WIDTH, 4 * WIDTH, bias=False)
        self.out = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        before = x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        joined = torch.cat([F.rms_norm(x, (WIDTH,)), F.rms_norm(before, (WIDTH,))], -1)
        return x + self.out(F.relu(self.mix(joined)).square())


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(WORDS, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(3))
        self.residual = nn.Parameter(torch.ones(3))
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens[:, :-1])
        for scale, block in zip(self.residual, self.h, strict=True):
            x = block(scale * x)
        logits = 15 * torch.tanh(self.lm_head(F.rms_norm(x, (WIDTH,))) / 15)
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def setup_optimizers(self) -> list[torch.optim.Optimizer]:
        groups = [
            {"params": self.lm_head.parameters(), "lr": 4e-3},
            {"params": self.wte.parameters(), "lr": 2e-2},
            {"params": [self.residual], "lr": 5e-3},
        ]
        adamw = torch.optim.AdamW(groups, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.01)
        muon = torch.optim.Muon(self.h.parameters(), lr=0.02, weight_decay=0.1)
        for group in (*adamw.param_groups, *muon.param_groups):
            group["initial_lr"] = group["lr"]
        return [adamw, muon]


def batch(micro: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * micro + rank)
    start, step = (torch.randint(1, high, (4, 1), generator=generator) for high in (WORDS, 6))
    return (start + step * torch.arange(17)) % WORDS


def train(model: Any, optimizers: list[torch.optim.Optimizer], rank: int, device: Any) -> list[float]:
    losses = []
    for step in range(STEPS):
        for micro in range(MICROS):
            loss = model(batch(MICROS * step + micro, rank).to(device)) / MICROS
            loss.backward()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * (1 - step / STEPS)
                if "momentum" in group:
                    group["momentum"] = 0.85 + 0.02 * step
            optimizer.step()
        model.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses


def averaged(model: nn.Module) -> None:
    """Have each gradient be the mean over ranks, as DistributedDataParallel does."""
    for parameter in model.parameters():

        def mean(gradient: Tensor) -> Tensor:
            whole = gradient.cpu()
            dist.all_reduce(whole)
            return (whole / dist.get_world_size()).to(gradient)

        parameter.register_hook(mean)


def script_body(context: Context, stage: int, path: str) -> tuple[float, float]:
    device = context.accelerator.device
    torch.manual_seed(0)
    plain = GPT().to(device)
    torch.manual_seed(0)
    model = GPT()
    averaged(plain)
    expected = train(plain, plain.setup_optimizers(), context.rank, device)
    optimizers = model.setup_optimizers()
    engine = zero.initialize(model, optimizers, zero.Config(stage=stage))
    losses = train(model, optimizers, context.rank, device)
    state = engine.state_dict()
    if context.rank == 0:
        torch.save(state, path)
        wanted = plain.state_dict()
        saved = torch.load(path)
        assert saved.keys() == wanted.keys()
        assert all(saved[name].dtype is value.dtype for name, value in wanted.items())
    return expected[0], max(map(abs, map(float.__sub__, losses, expected)))


@pytest.mark.parametrize("stage", [2, 3])
def test_a_script_like_nanochats(cluster: Clusters, tmp_path: Path, stage: int) -> None:
    for first, off in cluster(2).run(script_body, stage=stage, path=str(tmp_path / "model.pt")):
        assert first > 1
        assert off < CLOSE
