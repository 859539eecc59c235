"""What the scripts beside this one train: a small language model on text made of a rule."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

VOCABULARY, WIDTH, LENGTH = 32, 48, 16


class Block(nn.Module):
    """A residual block: the mean of what came before, and a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(2 * WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, length, WIDTH] to the same."""
        here = self.norm(x)
        before = here.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        return x + self.out(F.gelu(self.mix(torch.cat([here, before], -1))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.lm_head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Mean loss of predicting each of tokens [rows, LENGTH + 1] from those before it."""
        x = self.embed(tokens[:, :-1])
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.lm_head(x).flatten(0, 1), tokens[:, 1:].flatten())


def dataset() -> TensorDataset:
    """128 rows of tokens [LENGTH + 1], each counting up from somewhere in steps of 1 to 5."""
    generator = torch.Generator().manual_seed(1)
    start, step = (torch.randint(1, high, (128, 1), generator=generator) for high in (VOCABULARY, 6))
    return TensorDataset((start + step * torch.arange(LENGTH + 1)) % VOCABULARY)
