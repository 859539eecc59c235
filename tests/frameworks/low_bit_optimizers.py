"""Optimizers of torchao and bitsandbytes that keep their state in 8 and 4 bits, and a model for them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


def torchao(name: str) -> Callable[[nn.Module], Optimizer]:
    def make(model: nn.Module) -> Optimizer:
        kind: Any = getattr(import_module("torchao.optim"), name)
        return kind(model.parameters(), lr=1e-2, weight_decay=0.1)  # type: ignore[no-any-return]

    return make


def bitsandbytes(model: nn.Module) -> Optimizer:
    kind: Any = import_module("bitsandbytes").optim.AdamW8bit
    return kind(model.parameters(), lr=1e-2, weight_decay=0.1)  # type: ignore[no-any-return]


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "torchao AdamW8bit": torchao("AdamW8bit"),
    "torchao AdamW4bit": torchao("AdamW4bit"),
    "torchao AdamWFp8": torchao("AdamWFp8"),
    "bitsandbytes AdamW8bit": bitsandbytes,
}


def model() -> nn.Module:
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 66))


@contextmanager
def eagerly() -> Iterator[None]:
    """torchao compiles its step, for half a minute; what it computes is the same without."""
    torch.compiler.set_stance("force_eager")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* will step whole parameters")
        yield
    torch.compiler.set_stance("default")
