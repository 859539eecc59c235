"""Models for meshes of ranks, each beside what one process trains."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

WIDTH, TOKENS = 6, 8


def mesh_of(*dims: tuple[str, int]) -> Any:
    """A mesh of all ranks."""
    names, sizes = zip(*dims, strict=True)
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


class _Swapped(torch.autograd.Function):
    """An all-to-all of equal parts; its backward is another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _swap(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _swap(gradient, ctx.group), None


def _swap(x: Tensor, group: Any) -> Tensor:
    there = x.detach().cpu().contiguous()
    back = torch.empty_like(there)
    dist.all_to_all_single(back, there, group=group)
    return back.to(x.device)


class Expert(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.tanh(self.up(x)))
        return out


class Mixture(nn.Module):
    """Two experts, each for half of the tokens. In a group of two ranks, each has one of them.

    uneven: the second is larger by so much.
    """

    def __init__(self, group: Any = None, uneven: int = 0) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, WIDTH)
        both = [Expert(7), Expert(7 + uneven)]
        self.group = group
        self.experts = nn.ModuleList(both if group is None else [both[dist.get_rank(group)]])

    def forward(self, x: Tensor) -> Tensor:
        x = self.router(x)
        if self.group is None:
            first, second = x.chunk(2)
            return x + torch.cat([self.experts[0](first), self.experts[1](second)])
        swapped: Tensor = _Swapped.apply(x, self.group)  # type: ignore[no-untyped-call]
        back: Tensor = _Swapped.apply(self.experts[0](swapped), self.group)  # type: ignore[no-untyped-call]
        return x + back


class MixtureModel(nn.Module):
    def __init__(self, group: Any = None, uneven: int = 0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mixture(group, uneven) for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x).square().mean()
        return out


def mixture(group: Any = None, uneven: int = 0) -> MixtureModel:
    """Experts are drawn in one order, so that each is the same in one process and in a group."""
    torch.manual_seed(3)
    return MixtureModel(group, uneven)


def tokens(step: int, rank: int) -> Tensor:
    return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


class Stage(nn.Module):
    """A model of its own. Each has parameters of other sizes, under other names."""

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(20 + number)
        names = [f"layer{number}_{i}" for i in range(2 + number)]
        self.layers = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in names})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = torch.tanh(layer(x))
        return x.square().mean()
