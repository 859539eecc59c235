"""Windows of several backwards, of models whose gradients come in parts, late, or on some ranks alone."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zero
from accelz.conformance.cluster import Context
from tests.zero.helpers.kept import kept_gradients, kept_values
from tests.zero.helpers.models import LanguageModel, features, tokens
from tests.zero.helpers.paths import Optionals
from tests.zero.helpers.training import adamw

Bits = dict[str, Tensor]


class Sometimes(nn.Module):
    """A language model beside blocks of which each rank uses none in every other micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.always = LanguageModel(layers=2)
        self.sometimes = Optionals("in a row")
        del self.sometimes.layers[2:]

    def forward(self, tokens: Tensor, x: Tensor, number: int) -> Tensor:
        other = self.sometimes(x, use_extra=number % 3 == 0)
        return self.always(tokens)["loss"] + (other if number % 2 else other.detach())


class Recomputed(Sometimes):
    """Its gradients come in several parts: a backward inside the backward ends at every checkpoint."""

    def forward(self, tokens: Tensor, x: Tensor, number: int) -> Tensor:
        x = x.requires_grad_()
        for _ in range(3):
            x = checkpoint(self.sometimes.layers[0], x, False, use_reentrant=True)
        return x.square().mean()


class Late(Sometimes):
    """Parts are used in their blocks or before: gradients then come after a reduction (below stage 3)."""

    def forward(self, tokens: Tensor, x: Tensor, number: int) -> Tensor:
        for layer in self.sometimes.layers:
            before = F.linear(x, layer.extra.weight, layer.extra.bias) if number % 3 == 1 else x
            x = layer(before, use_extra=number % 3 == 2)
        return x.square().mean()


def trained(
    context: Context, loops: Sequence[str], window: int, kind: type[nn.Module] = Sometimes, **settings: Any
) -> Bits:
    """This rank's parts of each step's gradients, and of all values after the last. loops: one per step."""
    model = kind()
    count = window if "counted" in loops else None
    engine = zero.initialize(
        model, adamw(model), zero.Config(timeout=20, gradient_accumulation_steps=count, **settings)
    )
    found = Bits()
    for (step, loop), part in product(enumerate(loops), range(window)):
        number = step * window + part
        x = features(number, context.rank, model)
        x = x if engine.loss_scale is None else x.half()
        loss = model(tokens(number, context.rank, model), x, number + context.rank)
        loss = loss if count or window == 1 else loss / window
        waits = loop == "no_sync" and part + 1 < window
        with engine.no_sync() if waits else nullcontext():
            engine.backward(loss) if count or engine.loss_scale is not None else loss.backward()
        if part + 1 == window:
            gradients = kept_gradients(engine)
            found |= {f"step {step}, {name}": value for name, value in gradients.items()}
            assert gradients
            assert engine.step()
    return found | kept_values(engine)
