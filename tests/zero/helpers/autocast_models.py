"""Models that autocast treats in different ways in different layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.zero.helpers.models import WIDTH, LanguageModel, device_of, features, tokens


def gentle(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer with a learning rate at which a few steps do not amplify rounding."""
    return torch.optim.AdamW(model.parameters(), lr=2e-3)


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return build()


def language_loss(model: nn.Module, step: int, rank: int) -> Tensor:
    with torch.autocast(device_of(model).type, torch.bfloat16):
        return model(tokens(step, rank, model))["loss"]


class Affine(nn.Module):
    """A user-defined layer with a matrix product."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width)
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Mixture(nn.Module):
    """Layers that autocast treats in different ways, and parameters outside of layers that it knows."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(1, 1, width))
        self.places = nn.Parameter(torch.randn(1, 4, width))
        self.convolution = nn.Conv1d(width, width, 3, padding=1)
        self.group_norm = nn.GroupNorm(2, width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.table_norm = nn.LayerNorm((4, width))
        self.affine = Affine(width)
        self.pair = nn.Bilinear(width, width, width)
        self.experts = nn.Parameter(torch.randn(2, width, width) / width)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.start.expand(len(x), -1, -1), x[:, None].expand(-1, 3, -1)], 1) + self.places
        x = x + self.group_norm(self.convolution(x.mT)).mT
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.affine(self.table_norm(x))
        x = x + torch.einsum("bsi,eij->bsj", x, self.experts)
        return self.pair(x, x)


def mixture_loss(model: nn.Module, step: int, rank: int) -> Tensor:
    x = features(step, rank, model)
    with torch.autocast(x.device.type, torch.bfloat16):
        return model(x).float().square().mean()


def once() -> nn.Module:
    """A model without a block that is used twice."""
    return LanguageModel(repeat=False)
