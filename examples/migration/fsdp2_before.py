"""FSDP2, before: torchrun --standalone --nproc-per-node 2 fsdp2_before.py FOLDER"""

from __future__ import annotations

import os
import sys

import torch
from torch import distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from task import Model, dataset


def main() -> None:
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    if device.type != "cpu":
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh(device.type, (int(os.environ["WORLD_SIZE"]),))
    torch.manual_seed(0)
    model = Model().to(device)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=24)
    sampler = DistributedSampler(dataset())
    loader = DataLoader(dataset(), batch_size=8, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for (tokens,) in loader:
            loss = model(tokens.to(device))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if dist.get_rank() == 0:
                print(f"loss {loss.item():.6f}")
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        torch.save(weights, f"{sys.argv[1]}/weights.pt")
    dist.destroy_process_group()


main()
