"""Models whose weights torchao trains in 8 bits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.prototype.quantized_training import int8_mixed_precision_training
from torchao.quantization import quantize_

WIDTH, BLOCKS = 64, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) + x


def emulated(model: nn.Module) -> nn.Module:
    config = Float8LinearConfig(emulate=True, enable_fsdp_float8_all_gather=True)
    return convert_to_float8_training(model, config=config)


def multiplied(model: nn.Module) -> nn.Module:
    """By torch._scaled_mm."""
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    return convert_to_float8_training(model, config=config)


def rowwise(model: nn.Module) -> nn.Module:
    """By torch._scaled_mm, with a scale for each row: the weights are plain, and travel as such."""
    return convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name("rowwise"))


def int8(model: nn.Module) -> nn.Module:
    quantize_(model, int8_mixed_precision_training())
    return model


KINDS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "float8": emulated,
    "float8 products": multiplied,
    "int8": int8,
}
CODED = ("float8", "float8 products")
"""The kinds whose weights travel as codes."""


def built(kind: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    return KINDS[kind](plain_model().to(dtype))


def plain_model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(*(Block() for _ in range(BLOCKS)))
