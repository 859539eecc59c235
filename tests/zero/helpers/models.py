"""Small models with everything that makes sharding hard."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

VOCABULARY = 29
WIDTH = 12


class Block(nn.Module):
    """A residual block of odd sizes; the second layer may be frozen."""

    def __init__(self, width: int, frozen: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 5)
        self.down = nn.Linear(2 * width + 5, width)
        self.down.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class LanguageModel(nn.Module):
    """A language model that is hard to shard. Returns a dict.

    It has a tied embedding and head in different children, a frozen part, a block used twice, a buffer, and
    parameters with no elements, with one element, and with other than row-major strides.
    """

    def __init__(self, layers: int = 3, width: int = WIDTH, repeat: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, frozen=i == 1) for i in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.turned = nn.Parameter(torch.eye(width).mul(1.1).t())
        self.register_buffer("shift", torch.linspace(-0.1, 0.1, width))
        self.repeat = repeat

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        x = self.embedding(tokens) @ self.turned + self.shift.to(self.turned.dtype)
        for block in self.blocks:
            x = block(x)
        if self.repeat:
            x = self.blocks[0](x)
        logits = self.head(self.norm(x) * self.gain) + self.empty.sum()
        return {"loss": cross_entropy(logits.flatten(0, 1).float(), tokens.flatten()), "logits": logits}


@dataclass
class Answer:
    """A dataclass output, as many model libraries have."""

    loss: Tensor
    note: str = ""


class Stack(nn.Module):
    """Blocks whose path is chosen per call: an order, with repeats and omissions."""

    def __init__(self, layers: int = 4, width: int = WIDTH, frozen: int | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, frozen=i == frozen) for i in range(layers))
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, path: tuple[int, ...], recompute: str = "") -> Answer:
        for index in path:
            if recompute:
                x = checkpoint(self.blocks[index], x, use_reentrant=recompute == "reentrant")
            else:
                x = self.blocks[index](x)
        return Answer((x * self.scale).square().mean(), "stack")


def tokens(step: int, rank: int, on: nn.Module, batch: int = 2, length: int = 7) -> Tensor:
    """The batch of one rank at one step, on the device of the model `on`."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, VOCABULARY, (batch, length), generator=generator).to(device_of(on))


def features(step: int, rank: int, on: nn.Module, batch: int = 3, width: int = WIDTH) -> Tensor:
    """One rank's batch of feature vectors, on the device of the model `on`."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(batch, width, generator=generator).to(device_of(on))


def device_of(model: nn.Module) -> torch.device:
    """The device of a model's parameters."""
    return next(model.parameters()).device


def language_loss(model: nn.Module, step: int, rank: int) -> Tensor:
    return model(tokens(step, rank, model))["loss"]


def fresh(layers: int = 3) -> LanguageModel:
    torch.manual_seed(3)
    return LanguageModel(layers)
