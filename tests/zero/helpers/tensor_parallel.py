"""A small model, and the same divided by torch's tensor parallelism."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zero

WIDTH, HIDDEN, BLOCKS = 12, 10, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def whole() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, 3))


def parallel(mesh: DeviceMesh) -> nn.Module:
    """The same values; of the last layer every rank has all, as a DTensor."""
    model = whole()
    for block in list(model.children())[:BLOCKS]:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    parallelize_module(
        model, mesh, {str(BLOCKS): ColwiseParallel(output_layouts=Replicate(), use_local_output=True)}
    )
    return model


def full(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def compared(engine: zero.Engine, model: nn.Module, weights: dict[str, Tensor]) -> float:
    """The largest relative error of a weight, whole over the mesh."""
    with zero.gathered(model):
        found = {name: full(p.detach()).float() for name, p in model.named_parameters()}
    return max(float((found[n] - w).norm() / (w.norm() + 1e-12)) for n, w in weights.items())
