"""Which parameters autocast always casts, by what a module's class does with them."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn import functional

import zero
from tests.zero.helpers.autocast_models import (
    Affine,
    Mixture,
)
from tests.zero.helpers.models import LanguageModel
from zero.sharding.autocast import cast_before_use


def names(model: nn.Module, *modules: Any) -> set[str]:
    castable = cast_before_use(model, zero.Config(autocast_modules=modules))
    return {name for name, parameter in model.named_parameters() if parameter in castable}


def test_what_is_cast_before_each_use() -> None:
    torchs = {"convolution.weight", "attention.in_proj_weight", "attention.out_proj.weight"}
    assert names(Mixture()) == torchs
    assert names(Mixture(), Affine) == names(Mixture(), "Affine") == torchs | {"affine.weight"}
    assert zero.Config(autocast_modules="Affine") == zero.Config(autocast_modules=["Affine"])  # type: ignore[arg-type]
    assert names(Mixture(), "Affine", Mixture) == torchs | {"affine.weight", "start", "places", "experts"}


def test_every_module_that_holds_a_parameter_counts() -> None:
    assert names(LanguageModel()) & {"head.weight", "embedding.weight", "blocks.0.up.weight"} == {
        "blocks.0.up.weight"  # the head's matrix is the embedding's
    }
    assert "embedding.weight" in names(LanguageModel(), nn.Embedding)  # unless a user says so
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.LSTM(4, 4))
    layers[1].weight = layers[0].weight
    assert names(layers) == {"0.weight"}
    layers[2].shared = layers[0].weight
    assert not names(layers)


class Standardised(nn.Linear):
    """Computes with other values than its weight."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean(1, keepdim=True)
        return functional.linear(x, weight, self.bias)


def test_layers_that_compute_with_something_else_are_unknown() -> None:
    assert not names(Standardised(4, 4))
    assert not names(nn.utils.spectral_norm(nn.Linear(4, 4)))
    assert not names(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)))
    patched = nn.Linear(4, 4)
    patched.forward = lambda x: x * patched.weight  # type: ignore[method-assign]
    assert not names(patched)
    assert names(type("Named", (nn.Linear,), {})(4, 4)) == {"weight"}


def test_classes_that_change_nothing_are_refused() -> None:
    with pytest.raises(zero.ConfigError, match="no module of class 'Expert' has matrices"):
        names(Mixture(), "Expert")
    with pytest.raises(zero.ConfigError, match="no module of class 'LayerNorm'"):
        names(LanguageModel(), nn.LayerNorm)
    with pytest.raises(zero.ConfigError, match="set stage=3"):
        zero.Config(stage=2, autocast_modules=("Affine",))
