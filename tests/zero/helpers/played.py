"""Ranks of large meshes, played in one process without data by torch's fake process group.

Run as a program with ranks as arguments, it prints a line of JSON: what `zero.plan` says of each, the seconds
that took, and the most memory of the process.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zero

SIZES, DIMS = (64, 8, 8), ("dp", "ep", "tp")
LAYERS, WIDTH, HIDDEN, KEYS, VOCABULARY, EXPERT = 80, 8192, 28672, 1024, 128256, 512
PLAN = {
    "embedding": RowwiseParallel(input_layouts=Replicate()),
    "blocks.*.query": ColwiseParallel(),
    "blocks.*.key": ColwiseParallel(),
    "blocks.*.value": ColwiseParallel(),
    "blocks.*.output": RowwiseParallel(),
    "blocks.*.gate": ColwiseParallel(),
    "blocks.*.up": ColwiseParallel(),
    "blocks.*.down": RowwiseParallel(),
    "head": ColwiseParallel(output_layouts=Replicate()),
}


@contextmanager
def mesh_of(rank: int) -> Iterator[DeviceMesh]:
    """The mesh as one rank sees it."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=64 * 8 * 8)
    yield init_device_mesh("cpu", SIZES, mesh_dim_names=DIMS)
    dist.destroy_process_group()


class Block(nn.Module):
    """A Llama's, and a small expert of each rank's own."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.query, self.output = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(WIDTH, KEYS, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.expert = nn.Linear(WIDTH, EXPERT, bias=False)


def llama(mesh: DeviceMesh) -> nn.Module:
    """Llama 3's 70 B, without values, divided along "tp"."""
    with torch.device("meta"):
        model = nn.Module()
        model.embedding = nn.Embedding(VOCABULARY, WIDTH)
        model.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        model.norm = nn.RMSNorm(WIDTH)
        model.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
    return parallelize_module(model, mesh["tp"], PLAN, src_data_rank=None)


def played(rank: int) -> dict[str, Any]:
    with mesh_of(rank) as mesh:
        model = llama(mesh)
        config = zero.Config(precision="bf16", local_modules={"blocks.*.expert": "ep"})
        optimizer = torch.optim.AdamW(model.parameters())
        plan = zero.plan(model, optimizer, config, mesh=mesh, data_dims=("dp", "ep"))
        rest = plan.memory.rest["device"]
        return {
            "coordinate": mesh.get_coordinate(),
            "parameters": plan.parameters,
            "units": len(plan.units),
            "groups": [[g.numel, g.shard_numel, g.ranks] for g in plan.units[1].groups],
            "rest": [rest.parameters, rest.optimizer],
            "peak": plan.memory.device,
            "collectives": plan.traffic.collectives,
        }


if __name__ == "__main__":
    began = time.monotonic()
    found = [played(int(rank)) for rank in sys.argv[1:]]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"ranks": found, "seconds": time.monotonic() - began, "bytes": peak}))
