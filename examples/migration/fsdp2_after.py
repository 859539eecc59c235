"""FSDP2, after: torchrun --standalone --nproc-per-node 2 fsdp2_after.py FOLDER"""

from __future__ import annotations

import sys

import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import zero
from task import Model, dataset


def main() -> None:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=24)
    engine = zero.initialize(model, optimizer, zero.Config(stage=3))
    sampler = DistributedSampler(dataset(), engine.world_size, engine.rank)
    loader = DataLoader(dataset(), batch_size=8, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for (tokens,) in loader:
            loss = model(tokens.to(engine.device))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if engine.rank == 0:
                print(f"loss {loss.item():.6f}")
    weights = engine.state_dict()  # on every rank
    if engine.rank == 0:
        torch.save(weights, f"{sys.argv[1]}/weights.pt")


main()
