"""The model that every peer trains: a Llama-like decoder, and synthetic tokens for it.

Pre-norm blocks with RMSNorm, rotary positions, SwiGLU (Touvron et al., LLaMA, 2023), head not tied.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import typer
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Shape:
    """The model's dimensions. width: features, a multiple of 2 × heads. hidden: features inside the MLP."""

    layers: int
    width: int
    heads: int
    hidden: int
    vocabulary: int


class _Sizes(dict[str, Shape]):
    def __missing__(self, name: str) -> Shape:
        raise typer.BadParameter(f"there is no size {name!r}; the sizes are {', '.join(self)}")


SIZES = _Sizes({
    "tiny": Shape(layers=2, width=64, heads=2, hidden=176, vocabulary=256),
    "small": Shape(layers=4, width=256, heads=4, hidden=688, vocabulary=4096),
    "medium": Shape(layers=8, width=512, heads=8, hidden=1376, vocabulary=8192),
    "large": Shape(layers=12, width=768, heads=12, hidden=2048, vocabulary=8192),
    "huge": Shape(layers=16, width=2048, heads=16, hidden=5504, vocabulary=32768),
    "1b": Shape(layers=24, width=2048, heads=16, hidden=5504, vocabulary=32768),
    "3b": Shape(layers=26, width=3072, heads=24, hidden=8192, vocabulary=32768),
    "7b": Shape(layers=36, width=4096, heads=32, hidden=11008, vocabulary=32768),
    "9b": Shape(layers=44, width=4096, heads=32, hidden=11008, vocabulary=32768),
    "13b": Shape(layers=64, width=4096, heads=32, hidden=11008, vocabulary=32768),
})  # fmt: skip
"""Models of 0.1 M parameters (for tests), 5 M, 34 M, 98 M; and, for an accelerator, of 0.94 G, 1.35 G, 3.1 G,
7.6 G, 9.2 G and 13.2 G."""


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.query, self.key, self.value, self.output = (
            nn.Linear(shape.width, shape.width, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        split = (*x.shape[:-1], self.heads, -1)
        query, key, value = (f(x).view(split).transpose(1, 2) for f in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(
            _rotate(query, *rotation), _rotate(key, *rotation), value, is_causal=True
        )
        result: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return result


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.width)
        self.attention = Attention(shape)
        self.mlp_norm = nn.RMSNorm(shape.width)
        self.gate = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        h = self.mlp_norm(x)
        result: Tensor = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return result


class Decoder(nn.Module):
    """The model. Takes inputs and targets [batch, length] (int64), at most as long as it is made for,
    and returns their mean loss."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        for name, table in zip(
            ("cos", "sin"), _rotary_tables(shape.width // shape.heads, length), strict=True
        ):
            self.register_buffer(name, table, persistent=False)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(inputs)
        length = inputs.shape[1]
        rotation = (self.cos[:length].to(x.dtype), self.sin[:length].to(x.dtype))
        for block in self.blocks:
            x = block(x, rotation)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), targets.flatten())


def build(size: str, length: int) -> Decoder:
    """Make the model on torch's default device, with the same fp32 values for every rank and peer there."""
    torch.manual_seed(0)
    model = Decoder(SIZES[size], length)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.02)
    return model


def count_parameters(size: str) -> int:
    """The number of the model's parameters, found without allocating memory for them."""
    with torch.device("meta"):
        return sum(p.numel() for p in Decoder(SIZES[size], 1).parameters())


def activation_bytes(size: str, tokens: int) -> int:
    """About what a forward of `tokens` saves for its backward: activations in 16 bits, logits in both."""
    shape = SIZES[size]
    block = 2 * (12 * shape.width + 4 * shape.hidden)
    return tokens * (shape.layers * block + 12 * shape.vocabulary)


def make_batches(size: str, batch: int, length: int, rank: int, count: int) -> list[tuple[Tensor, Tensor]]:
    """`count` random batches (inputs, targets), each [batch, length], different on every rank."""
    generator = torch.Generator().manual_seed(1000 + rank)
    high = SIZES[size].vocabulary
    tokens = (torch.randint(high, (batch, length + 1), generator=generator) for _ in range(count))
    return [(t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in tokens]


def _rotary_tables(features: int, length: int) -> tuple[Tensor, Tensor]:
    frequency = 10_000.0 ** (-torch.arange(0, features, 2, dtype=torch.float32) / features)
    angle = torch.outer(torch.arange(length, dtype=torch.float32), frequency)
    return angle.cos(), angle.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
