"""Ranks that go different ways through the same model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.conftest import Abilities
from tests.zero.helpers.models import WIDTH, Block, features
from tests.zero.helpers.paths import (
    Optionals,
    decaying,
    error_of,
    fresh,
    optional_loss,
)
from tests.zero.helpers.training import train_averaging, train_zero

STEPS = 4  # in which every rank has differed from the others


def optional_body(context: Context, shape: str) -> dict[int, float]:
    """By the size of the largest parameters that persist."""

    def model() -> Optionals:
        torch.manual_seed(2)
        return Optionals(shape)

    reference = train_averaging(context, model(), optional_loss, decaying, steps=STEPS)
    errors = {}
    for most in (0, 2, 20):
        config = zero.Config(timeout=10, persistent_below=most)
        errors[most] = error_of(
            train_zero(context, model(), optional_loss, config, decaying, steps=STEPS), reference
        )
    return errors


@pytest.mark.parametrize(
    ("size", "shape"),
    [(3, "in a row"), (3, "side by side"), (3, "twice"), (3, "after one thrown away"), (2, "twice")],
)
def test_ranks_that_use_different_parameters_of_a_unit(
    cluster: Clusters, abilities: Abilities, size: int, shape: str
) -> None:
    """At stage 3 all ranks gather the same units, but may use different parameters inside.

    They issue collectives in one order even so, as libraries with one queue for everything need.
    """
    for found in cluster(size).run(optional_body, shape=shape):
        assert max(found.values()) < abilities.close, found


class Dropping(nn.Module):
    """A block that is recomputed in the backward, or left out on some ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(WIDTH)

    def forward(self, x: Tensor, drop: bool) -> Tensor:
        return x if drop else self.block(x)


class Droppings(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Dropping() for _ in range(4))
        self.reentrant = reentrant

    def forward(self, x: Tensor, dropped: list[bool]) -> Tensor:
        x = self.first(x)
        for layer, drop in zip(self.layers, dropped, strict=True):
            x = checkpoint(layer, x, drop, use_reentrant=self.reentrant)
        return x.square().mean()


def dropping_loss(model: nn.Module, step: int, rank: int) -> Tensor:
    chance = torch.rand(4, generator=torch.Generator().manual_seed(7 * step + rank))
    return model(features(step, rank, model), (chance < 0.4).tolist())


def dropping_body(context: Context, reentrant: bool) -> float:
    torch.manual_seed(2)
    model = Droppings(reentrant)
    reference = train_averaging(context, model, dropping_loss, decaying, steps=STEPS)
    errors = []
    for prefetch in (0, 1, 3):
        config = zero.Config(timeout=10, prefetch=prefetch)
        run = train_zero(context, copy.deepcopy(model), dropping_loss, config, decaying, steps=STEPS)
        errors.append(error_of(run, reference))
    return max(errors)


@pytest.mark.parametrize("reentrant", [False, True])
def test_ranks_that_drop_different_layers_and_recompute_the_rest(
    cluster: Clusters, abilities: Abilities, reentrant: bool
) -> None:
    """What is recomputed is already whole, so no rank gathers other units ahead for it."""
    assert max(cluster(3).run(dropping_body, reentrant=reentrant)) < abilities.close


class Conditional(nn.Module):
    """A block that may be dropped, and may ignore what it is given besides its input."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(WIDTH)

    def forward(self, x: Tensor, condition: Tensor | None = None, drop: bool = False) -> Tensor:
        if drop:
            return x
        return self.block(x if condition is None else x + condition)


class Conditionals(nn.Module):
    """Blocks that ranks use in different ways, by name. here: whether this rank is the one that differs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.condition = nn.Linear(WIDTH, WIDTH)
        self.conditions = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.layers = nn.ModuleList(Conditional() for _ in range(3))
        self.kept: list[Tensor] = []

    def forward(self, features: Tensor, name: str, here: bool) -> Tensor:
        x = self.first(features)
        if name == "dropped behind a newer input":
            newer = self.condition(features)
            for index, layer in enumerate(self.layers):
                x = layer(x, newer, drop=here and index == 0)
        elif name == "dropped beside others":
            x = sum(layer(x, drop=here and index == 1) for index, layer in enumerate(self.layers))
        elif name == "newest input unused":
            for condition, layer in zip(self.conditions, self.layers, strict=True):
                given = condition(features)
                x = layer(x, given if here else given.detach())
        elif name == "shared and dropped":
            for index in range(4):
                x = self.layers[index % 2](x, drop=here and index == 0)
        elif name == "another output kept":
            for layer in self.layers:
                other = layer(x)
                self.kept += [other] if here else []
                x = layer(x)
        return x.square().mean()


WAYS = (
    "dropped behind a newer input",
    "dropped beside others",
    "newest input unused",
    "shared and dropped",
    "another output kept",
)


def ways_body(context: Context) -> dict[str, float]:
    errors = {}
    for name in WAYS:

        def loss(model: nn.Module, step: int, rank: int, name: str = name) -> Tensor:
            return model(features(step, rank, model), name, rank == step % 2)

        torch.manual_seed(2)
        model = Conditionals()
        reference = train_averaging(context, model, loss, decaying, steps=4)
        run = train_zero(context, model, loss, zero.Config(timeout=10), decaying, steps=4)
        errors[name] = error_of(run, reference)
    return errors


def test_ranks_that_go_different_ways_within_units(cluster: Clusters, abilities: Abilities) -> None:
    for found in cluster(2).run(ways_body):
        assert max(found.values()) < abilities.close, found


class Bag(dict[str, Tensor]):
    """A user-defined container, which is passed on as it is."""


class InBags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block(WIDTH)

    def forward(self, bag: Bag, drop: bool) -> Bag:
        return bag if drop else Bag(x=self.block(bag["x"]))


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(InBags() for _ in range(3))

    def forward(self, x: Tensor, here: bool) -> Tensor:
        bag = Bag(x=self.first(x))
        for index, layer in enumerate(self.layers):
            bag = layer(bag, drop=here and index == 1)
        return bag["x"].square().mean()


def bags_body(context: Context) -> float:
    def loss(model: nn.Module, step: int, rank: int) -> Tensor:
        return model(features(step, rank, model), rank == step % 2)

    torch.manual_seed(2)
    model = Bags()
    reference = train_averaging(context, model, loss, decaying, steps=4)
    run = train_zero(context, model, loss, zero.Config(timeout=10), decaying, steps=4)
    return error_of(run, reference)


def test_a_layer_that_is_dropped_with_its_container(cluster: Clusters, abilities: Abilities) -> None:
    assert max(cluster(2).run(bags_body)) < abilities.close


LATE = {
    "after what a rank leaves out": ((2, 2, 1, 0), (2, 2, 0)),
    "before what a rank leaves out": ((0, 1, 2, 2), (0, 2, 2)),
}


def late_body(context: Context, name: str) -> dict[int, float]:
    """A block that is recomputed twice gets its gradients one after the other, in two separate backwards."""

    def loss(model: nn.Module, step: int, rank: int) -> Tensor:
        x = features(step, rank, model).requires_grad_()
        return model(x, LATE[name][rank == 1], recompute="reentrant").loss

    errors = {}
    reference = train_averaging(context, fresh(), loss, decaying, steps=4)
    for stage in (0, 1, 2):
        run = train_zero(context, fresh(), loss, zero.Config(stage=stage, timeout=10), decaying, steps=4)
        errors[stage] = error_of(run, reference)
    return errors


@pytest.mark.parametrize("name", LATE)
def test_gradients_that_are_late_on_some_ranks(cluster: Clusters, abilities: Abilities, name: str) -> None:
    """Below stage 3 ranks may use different units; gradients after a reduction wait for all ranks."""
    for found in cluster(3).run(late_body, name=name):
        assert max(found.values()) < abilities.close, found


def rank_dependent(model: nn.Module, step: int, rank: int) -> Tensor:
    """Each rank leaves out different blocks."""
    return model(features(step, rank, model), (0, 1, 3) if (step + rank) % 2 else (2, 1)).loss


def rank_dependent_body(context: Context) -> dict[str, float]:
    errors = {}
    reference = train_averaging(context, fresh(None), rank_dependent, decaying, steps=STEPS)
    for stage in (0, 1, 2):
        run = train_zero(
            context, fresh(None), rank_dependent, zero.Config(stage=stage, timeout=10), decaying, steps=STEPS
        )
        errors[str(stage)] = error_of(run, reference)
    return errors


def test_ranks_that_use_different_blocks(cluster: Clusters, abilities: Abilities) -> None:
    """Below stage 3 nothing is gathered in forward, so ranks may take different paths."""
    for found in cluster(2).run(rank_dependent_body):
        assert max(found.values()) < abilities.close, found
