"""Models as they are built: losses on the side, adapters, frozen parts; and what outlives them."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from io import BytesIO
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.models import WIDTH, Block, features
from tests.zero.helpers.paths import (
    decaying,
    error_of,
    plain_loss,
)
from tests.zero.helpers.training import train_averaging, train_zero


class SelfAttending(nn.Module):
    """Blocks that check their inputs: the same tensor twice, and a container of the caller's."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_SelfAttending() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x, seen = x.requires_grad_(), {"input": x}
        for block in self.blocks:
            x = block(x, x, seen)
        assert len(seen) == 1 + len(self.blocks)
        return x.square().mean()


class _SelfAttending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block(WIDTH)

    def forward(self, query: Tensor, key: Tensor, seen: dict[str, Tensor]) -> Tensor:
        assert query is key
        seen[f"block {len(seen)}"] = key.detach()
        return self.block(query + key)


class SideChannel(nn.Module):
    """A block that keeps its own loss as an attribute, outside of what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(WIDTH)
        self.router = nn.Linear(WIDTH, 4)
        self.aux = torch.zeros(())

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        self.aux = self.router(x).logsumexp(-1).mean()
        return self.block(x), [x.detach()]


class Mixture(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SideChannel() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, _ = layer(x)
        return x.square().mean() + sum(layer.aux for layer in self.layers)


class CrossAttention(nn.Module):
    """Every decoder block also takes the encoder's output, which needs a gradient, and works in place."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(_Keyed() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        memory = self.encoder(x)
        x = memory * 1.0
        for block in self.blocks:
            x = block(x, memory=memory)
        return x.square().mean()


class _Keyed(nn.Module):
    """A frozen projection of the memory, and in-place arithmetic on the input."""

    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.value = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, memory: Tensor) -> Tensor:
        x += self.value(torch.tanh(x.clone()) * self.key(memory))
        return x * 1.5


class LowRank(nn.Module):
    """Frozen weights with small trainable adapters: the input's gradient still needs the frozen part."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Adapted() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class _Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


class RecomputedLowRank(LowRank):
    """Gradients go on to a leaf, through frozen weights beyond the last trained ones."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x.square().mean()


class Normed(nn.Module):
    """In each block, a small trained vector comes before frozen weights."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_(False), _Adapted())
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class FrozenBetween(nn.Module):
    """The root has a trained head, and frozen weights between units."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(2))
        self.between = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.between(self.blocks[0](x)))
        return self.head(self.blocks[1](x)).square().mean()


ARCHITECTURES: tuple[type[nn.Module], ...] = (
    Mixture,
    CrossAttention,
    LowRank,
    SelfAttending,
    RecomputedLowRank,
    Normed,
    FrozenBetween,
)


def architectures_body(context: Context) -> dict[str, float]:
    errors = {}
    for kind in ARCHITECTURES:
        torch.manual_seed(2)
        model = kind()
        reference = train_averaging(context, model, plain_loss, steps=4)
        for persistent in (0, WIDTH + 1):
            config = zero.Config(persistent_below=persistent, timeout=10)
            run = train_zero(context, copy.deepcopy(model), plain_loss, config, steps=4)
            errors[f"{kind.__name__}, persistent below {persistent}"] = error_of(run, reference)
    return errors


def test_architectures(cluster: Clusters) -> None:
    for found in cluster(2).run(architectures_body):
        assert max(found.values()) < 1e-5, found


def kept_output_body(context: Context, compile: bool) -> list[bool]:
    """Whether engine and model are freed although the model keeps a tensor from its last forward."""

    def trained(backward: bool) -> tuple[weakref.ref[Any], weakref.ref[Any]]:
        torch.manual_seed(2)
        model = Mixture(1)
        compiling = zero.Compile(inner="aot_eager") if compile else None
        engine = zero.initialize(model, decaying(model), zero.Config(timeout=10, compile=compiling))
        engine.backward(plain_loss(model, 0, context.rank))
        engine.step()
        loss = plain_loss(model, 1, context.rank)
        if backward:
            engine.backward(loss)
        return weakref.ref(engine), weakref.ref(model)

    gone = [trained(backward) for backward in (True, False)]
    gc.collect()
    return [left() is None for pair in gone for left in pair]


@pytest.mark.parametrize("compile", [False, True])
def test_a_model_that_keeps_an_output_is_freed(cluster: Clusters, compile: bool) -> None:
    for gone in cluster(2).run(kept_output_body, compile=compile):
        assert all(gone), gone


def saved_output_body(context: Context) -> bool:
    """A model's output may be saved and copied before its backward."""
    model = Mixture()
    engine = zero.initialize(model, decaying(model), zero.Config(timeout=10))
    output = engine(features(0, context.rank, model))
    file = BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.save({"output": output, "copy": copy.copy(output)}, file)
    engine.backward(output.square().mean())
    file.seek(0)
    return torch.equal(torch.load(file)["output"], output)


def test_an_output_can_be_saved(cluster: Clusters) -> None:
    assert all(cluster(1).run(saved_output_body))


def left_over_body(context: Context) -> dict[str, Any]:
    """What outlives engine and model: an input they shared with another engine, and a module of theirs."""

    def built() -> tuple[Mixture, zero.Engine]:
        torch.manual_seed(2)
        model = Mixture()
        return model, zero.initialize(model, decaying(model), zero.Config(timeout=10))

    gone, engine = built()
    router, bias = gone.layers[0].router, gone.layers[1].router.bias
    other, other_engine = built()
    encoded = features(0, context.rank, other).requires_grad_() * 1.0
    engine(encoded)
    del gone, engine
    gc.collect()
    other_engine.backward(other_engine(encoded))
    with zero.gathered(router):
        whole = tuple(router.weight.shape), bool(router.weight.any())
    del router
    gc.collect()
    with pytest.raises(zero.UsageError) as told, zero.gathered(bias):
        pass
    return {"whole": whole, "told": str(told.value)}


def test_what_outlives_an_engine(cluster: Clusters) -> None:
    for found in cluster(2).run(left_over_body):
        assert found["whole"] == ((4, WIDTH), True)
        assert "no longer exist" in found["told"]
