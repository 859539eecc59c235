"""Accelerate, before: torchrun --standalone --nproc-per-node 2 accelerate_before.py FOLDER"""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from task import Model, dataset


def main() -> None:
    accelerator = Accelerator(cpu=not torch.accelerator.is_available())
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=48)
    loader = DataLoader(dataset(), batch_size=8, shuffle=True)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    for _ in range(3):
        for (tokens,) in loader:
            loss = model(tokens)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            accelerator.print(f"loss {loss.item():.6f}")
    accelerator.save_model(model, sys.argv[1])
    accelerator.end_training()


main()
