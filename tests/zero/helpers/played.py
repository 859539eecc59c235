"""Ranks of large meshes, played in one process without data: planned, made and trained.

Run as a program on the device "played", with the number of layers and ranks as arguments, it prints a line of
JSON: what `zero.plan` says of each rank, what `zero.initialize` and steps do there, and what that takes. 80
layers are a Llama 3 of 70 B parameters.
"""

from __future__ import annotations

import gc
import json
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
import torch._dynamo  # which torch would import for each rank anew
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import scaled_dot_product_attention, silu

import accelz
import zero
from tests.zero.helpers.played_device import META, Played, PlayedStore

SIZES, DIMS = (64, 8, 8), ("dp", "ep", "tp")
WIDTH, HIDDEN, KEYS, HEAD, VOCABULARY, EXPERT = 8192, 28672, 1024, 128, 128256, 512
PLAN = {
    # By rows, torch would make a gradient of the whole embedding on every rank.
    "embedding": ColwiseParallel(output_layouts=Replicate()),
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
    import torch.testing._internal.distributed.fake_pg  # noqa: F401 (registers the backend)

    store = PlayedStore()  # torch keeps its native half only
    dist.init_process_group("fake", store=store, rank=rank, world_size=64 * 8 * 8)
    yield init_device_mesh("cpu", SIZES, mesh_dim_names=DIMS)
    dist.destroy_process_group()


class Block(nn.Module):
    """A Llama's, and a small expert of each rank's own, whose size differs. expert: its number."""

    def __init__(self, expert: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.query, self.output = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(WIDTH, KEYS, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.expert = nn.Linear(WIDTH, EXPERT * (1 + expert % 2), bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        q, k, v = (f(y).unflatten(-1, (-1, HEAD)).transpose(1, 2) for f in (self.query, self.key, self.value))
        attended = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.output(attended.transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        x = x + self.down(silu(self.gate(y)) * self.up(y))
        return x + self.expert(x).sum(-1, keepdim=True)


class Llama(nn.Module):
    def __init__(self, layers: int, expert: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(expert) for _ in range(layers))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def llama(mesh: DeviceMesh, layers: int) -> nn.Module:
    """A Llama 3 without values, divided along "tp"."""
    with torch.device("meta"):
        model = Llama(layers, mesh.get_local_rank("ep"))
    return parallelize_module(model, mesh["tp"], PLAN, src_data_rank=None)


def played(layers: int, rank: int) -> dict[str, Any]:
    """What is planned for a rank, and what it does."""
    with mesh_of(rank) as mesh:
        model = llama(mesh, layers)
        config = zero.Config(precision="bf16", clip_norm=1.0, local_modules={"blocks.*.expert": "ep"})
        optimizer = torch.optim.AdamW(model.parameters())
        began = time.process_time()
        plan = zero.plan(model, optimizer, config, mesh=mesh, data_dims=("dp", "ep"))
        planned = time.process_time()
        rest = plan.memory.rest["device"]
        return {
            "coordinate": mesh.get_coordinate(),
            "parameters": plan.parameters,
            "units": len(plan.units),
            "groups": [[g.numel, g.shard_numel, g.ranks] for unit in plan.units for g in unit.groups],
            "rest": [rest.parameters, rest.optimizer],
            "peaks": {phase: plan.memory.total(phase) for phase in plan.memory.peaks},
            "collectives": plan.traffic.collectives,
            "seconds": planned - began,
            "trained": trained(model, optimizer, config, mesh),
            "bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }


def trained(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: zero.Config, mesh: DeviceMesh
) -> dict[str, Any]:
    """What a rank has after `zero.initialize`, and what it issues there and in two steps of one token."""
    accelerator = accelz.current()
    assert isinstance(accelerator, Played)
    memory, issued = accelerator.memory, accelerator.collectives.issued
    issued.clear()
    before = memory.stats().allocated
    with accelerator.playing():
        memory.reset_peak()
        began = time.process_time()
        engine = zero.initialize(model, optimizer, config, mesh=mesh, data_dims=("dp", "ep"))
        seconds = time.process_time() - began
        peaks = {"init": memory.stats().peak - before}
        tokens = torch.zeros(1, 1, dtype=torch.int64, device=META)

        def note_peak(phase: str) -> None:
            peaks[phase] = memory.stats().peak - before
            memory.reset_peak()

        for _ in range(2):
            engine.traffic.clear()
            loss = model(tokens).float().square().mean()
            note_peak("forward")
            loss.backward()
            note_peak("backward")
            del loss
            optimizer.step()
            note_peak("step")
            optimizer.zero_grad()
        gc.collect()
        return {
            "seconds": seconds,
            "groups_made": accelerator.collectives.made,
            "peaks": peaks,
            "rest": memory.stats().allocated - before,
            "groups": [
                [g.layout.numel, g.layout.shard_numel, g.shards] for unit in engine.units for g in unit.groups
            ],
            "collectives": dict(engine.traffic.bytes),
            "issued": [(_told(ranks), f"{op} of {numel} x {dtype}") for op, ranks, numel, dtype in issued],
        }


def _told(ranks: Sequence[int]) -> str:
    """A set of ranks, which are evenly spaced in every dimension's order."""
    told = range(ranks[0], ranks[-1] + 1, ranks[1] - ranks[0])
    assert tuple(told) == tuple(ranks)
    return str(told)


if __name__ == "__main__":
    # A process for each: torch keeps the meshes of the first world that it has seen.
    with get_context("fork").Pool(1, maxtasksperchild=1) as processes:
        found = processes.map(partial(played, int(sys.argv[1])), map(int, sys.argv[2:]), chunksize=1)
    print(json.dumps(found))
