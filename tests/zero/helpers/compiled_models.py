"""Models for the compiled path."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zero
from tests.zero.helpers.training import adamw

VOCABULARY = 512
WIDTH = 32  # with the vocabulary: an embedding that is a unit of its own


class Block(nn.Module):
    """Attention and a layer that may be frozen, and no more: each operation takes time to compile."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH).requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.mix(self.norm(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.out(F.gelu(mixed.transpose(1, 2).flatten(2)))


class Transformer(nn.Module):
    """A decoder with embedding and head tied and one frozen layer; returns the loss.

    path: "straight"; "checkpointed" recomputes every block; "broken" has a graph break in every block,
    "broken checkpointed" in those that are recomputed, and "broken root" between them.
    """

    def __init__(self, path: str = "straight") -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(frozen=i == 1) for i in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.path = path

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if "checkpointed" in self.path else block(x)
            if self.path == "broken root":
                torch._dynamo.graph_break()
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), tokens.flatten())


class BrokenBlock(Block):
    """A block that dynamo cannot trace in one piece."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.0
        torch._dynamo.graph_break()
        return super().forward(x)


FAULTS: set[str] = set()
"""Where `watched` raises: "forward", "backward"."""


@torch.library.custom_op("zero_tests::watched", mutates_args=())
def watched(x: Tensor, where: str) -> Tensor:
    """A copy of `x`, or the error that a test wants, while a graph runs."""
    if where in FAULTS:
        raise ArithmeticError("as the test wants")
    return x.clone()


watched.register_fake(lambda x, where: torch.empty_like(x))
watched.register_autograd(lambda context, gradient: (watched(gradient, "backward"), None))


class Watched(nn.Module):
    """Layers with an operation between them that can raise."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 600)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = watched(block(x), "forward") + x
        return self.head(x).square().mean()


class Writing(nn.Module):
    """A forward that writes to its own parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.layer.weight.mul_(0.5)
        return self.layer(x).square().mean()


def fresh(path: str = "straight") -> Transformer:
    """The same values every time."""
    torch.manual_seed(7)
    model = Transformer(path)
    if path in ("broken", "broken checkpointed"):
        for block in model.blocks:
            block.__class__ = BrokenBlock
    return model


def tokens(step: int, rank: int, on: nn.Module, length: int = 9) -> Tensor:
    """One rank's batch at one step, where the model `on` is."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    found = torch.randint(0, VOCABULARY, (2, length), generator=generator)
    return found.to(next(on.parameters()).device)


LENGTH = 1024  # long enough that values are worth moving


def build(
    model: nn.Module, where: str = "host", fraction: float = 1.0, inner: Any = "aot_eager", **settings: Any
) -> zero.Engine:
    """inner: the inner compiler; None for an eager engine."""
    part = {"activations": fraction} if where == "host" else {}
    offload = zero.Offload(activations=where, fraction=part)
    compiling = None if inner is None else zero.Compile(inner=inner)
    config = zero.Config(compile=compiling, offload=offload, timeout=100, **settings)
    return zero.initialize(model, adamw(model), config)
