"""The cells of a notebook: ranks by Accelerate's launcher, before the kernel has an engine and after."""

from __future__ import annotations

import sys

import accelerate
import torch

import zero


def train() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(32, 32)
    optimizer = torch.optim.AdamW(model.parameters())
    engine = zero.initialize(model, optimizer, zero.Config(stage=3, timeout=60.0))
    held = sum(piece.numel() for group in optimizer.param_groups for piece in group["params"])
    model(torch.ones(2, 32)).sum().backward()
    optimizer.step()
    print(f"rank {engine.rank} of {engine.world_size} holds {held}\n", end="", flush=True)


def launch() -> None:
    accelerate.notebook_launcher(train, num_processes=2, use_port=sys.argv[1])


if __name__ == "__main__":
    launch()
    train()
    launch()
