"""A small decoder with grouped queries, for sequences and layers that are divided over ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.zero.helpers.optimizers import sgd

WORDS, WIDTH, HEADS, ROWS, LENGTH = 11, 16, 4, 2, 8


class Layer(nn.Module):
    def __init__(self, keys: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key, self.value = (nn.Linear(WIDTH, keys * WIDTH // HEADS) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        q, k, v = (
            layer(normed).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.out(found.transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    """keys: heads of keys and values, for each layer."""

    def __init__(self, keys: tuple[int, ...], recomputed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer(n) for n in keys)
        self.head = nn.Linear(WIDTH, WORDS)
        self.recomputed = recomputed

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids) + self.places(position_ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputed else layer(x)
        found: Tensor = self.head(x)
        return found


def one_process(
    model: nn.Module, loss_of: Callable[[nn.Module, int, int], Tensor], steps: int, clip: float
) -> tuple[list[list[float]], list[float], dict[str, Tensor]]:
    """Losses by step and row, norms and final weights of one process that has the data of two rows of ranks.
    loss_of(model, step, row). clip: the largest norm."""
    losses, norms, optimizer = [], [], sgd(model)
    for step in range(steps):
        each = [loss_of(model, step, row) for row in range(2)]
        torch.stack(each).mean().backward()
        losses.append([loss.item() for loss in each])
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, {name: value.detach() for name, value in model.state_dict().items()}
