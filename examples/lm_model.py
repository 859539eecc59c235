"""A small decoder-only transformer over bytes: pre-norm blocks, rotary positions, tied embedding and head.

Nothing here knows about zero: this is an ordinary module.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lm_settings import Shape

BYTES = 256  # the vocabulary


class Rotary(nn.Module):
    """Rotary position embedding (Su et al., RoFormer, 2021), with a base for short contexts."""

    cos: Tensor
    sin: Tensor

    def __init__(self, features: int, context: int, base: float = 500.0) -> None:
        super().__init__()
        frequency = base ** (-torch.arange(0, features, 2, dtype=torch.float32) / features)
        angle = torch.outer(torch.arange(context, dtype=torch.float32), frequency)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Rotate x [..., length, features] by its positions."""
        cos, sin = (table[: x.shape[-2]].to(x.dtype) for table in (self.cos, self.sin))
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.query_key_value = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.rotary = Rotary(shape.width // shape.heads, shape.context)
        self.output = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.query_key_value(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(self.rotary(query), self.rotary(key), value, is_causal=True)
        return self.output(mixed.transpose(1, 2).reshape(batch, length, width))


class GatedMlp(nn.Module):
    """SwiGLU (Shazeer, GLU Variants Improve Transformer, 2020), as large as a plain MLP of 4 × width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = max(1, width // 12) * 32  # 8/3 × width, a multiple of 32
        self.expand = nn.Linear(width, 2 * inner, bias=False)
        self.contract = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.expand(x).chunk(2, dim=-1)
        return self.contract(F.silu(gate) * value)


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.width, bias=False)
        self.attention = Attention(shape)
        self.mlp_norm = nn.LayerNorm(shape.width, bias=False)
        self.mlp = GatedMlp(shape.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class LanguageModel(nn.Module):
    """Predicts each byte from the bytes before it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width, bias=False)
        self.head = nn.Linear(shape.width, BYTES, bias=False)
        self.head.weight = self.embedding.weight
        self._initialise()

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits [batch, length, 256] of the next bytes; with targets [batch, length] their mean loss."""
        x = self.embedding(inputs)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def _initialise(self) -> None:
        """Normal weights, but zero where a block writes to the residual stream, so it starts as the identity.

        The embedding is also the head: small values keep the first predictions close to even.
        """
        for name, parameter in self.named_parameters():
            if name.endswith(("output.weight", "contract.weight")):
                nn.init.zeros_(parameter)
            elif parameter is self.embedding.weight:
                nn.init.normal_(parameter, std=0.02)
            elif parameter.ndim == 2:
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
