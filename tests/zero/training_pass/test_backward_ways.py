"""Backwards that share graphs, run inside others, or make graphs: the gradients of unsharded training."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.conftest import Abilities
from tests.zero.helpers.models import WIDTH, Block, features
from tests.zero.helpers.training import adamw


class Heads(nn.Module):
    """Blocks, one of which is used twice, and two losses."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, recompute: str = "") -> tuple[Tensor, Tensor]:
        for index in (0, 1, 2, 1, 3):
            if recompute:
                x = checkpoint(self.blocks[index], x, use_reentrant=recompute == "reentrant")
            else:
                x = self.blocks[index](x)
        return (x * self.scale).square().mean(), self.head(x).square().mean()


Way = Callable[[Heads, Heads, int], None]
"""Backwards through a model, and perhaps through another one, on the batch of a rank."""


def batch(rank: int, model: Heads, step: int = 0) -> Tensor:
    return features(step, rank, model).requires_grad_()


def twice(model: Heads, other: Heads, rank: int, recompute: str = "") -> None:
    one, two = model(batch(rank, model), recompute)
    loss = one * two
    loss.backward(retain_graph=True)
    loss.backward()


def two_losses(model: Heads, other: Heads, rank: int, recompute: str = "") -> None:
    one, two = model(batch(rank, model), recompute)
    one.backward(retain_graph=True)
    two.backward()


def recomputed(way: Callable[..., None], kind: str) -> Way:
    return lambda model, other, rank: way(model, other, rank, kind)


def in_any_order(model: Heads, other: Heads, rank: int) -> None:
    """Each rank begins with another loss, and another forward comes between."""
    losses = model(batch(rank, model))
    three, four = model(batch(rank, model, 1))
    losses[rank % 2].backward(retain_graph=True)
    (three + four).backward()
    losses[1 - rank % 2].backward(retain_graph=True)
    (losses[0] * losses[1]).backward()


def part_of_a_graph(model: Heads, other: Heads, rank: int) -> None:
    x = model.blocks[1](model.blocks[0](batch(rank, model)))
    middle = x.square().mean()
    end = model.blocks[3](x).square().mean()
    end.backward(retain_graph=True)
    middle.backward(retain_graph=True)
    (middle * end).backward()


class Within(torch.autograd.Function):
    """In its backward, calls `run`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Callable[[], Any]) -> Tensor:
        ctx.run = run
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        with torch.enable_grad():
            ctx.run()
        return gradient, None


def run(model: Heads, rank: int) -> None:
    one, two = model(batch(rank, model, 5))
    (one + two).backward()


def inside_another(model: Heads, other: Heads, rank: int) -> None:
    one, two = model(batch(rank, model))
    (Within.apply(one, lambda: run(other, rank)) + two).backward()


def inside_its_own(model: Heads, other: Heads, rank: int) -> None:
    """Before the outer backward has come to the model."""
    one, two = model(batch(rank, model))
    (Within.apply(one, lambda: run(model, rank)) + two).backward()


def amid_another(model: Heads, other: Heads, rank: int) -> None:
    """Of a model that the outer backward goes through, too."""
    x = model.blocks[0](batch(rank, model)) + other.blocks[0](batch(rank, other, 2))
    x = Within.apply(x, lambda: run(other, rank))
    (model.blocks[3](x) + other.blocks[3](x)).square().mean().backward()


def failed_inside(model: Heads, other: Heads, rank: int) -> None:
    """A run inside another fails, which the program outlives."""

    def fail() -> None:
        raise ArithmeticError("in the backward")

    def try_twice() -> None:
        try:
            one, two = other(Within.apply(batch(rank, other, 3), fail))
            (one + two).backward()
        except ArithmeticError:
            other.zero_grad()
        run(other, rank)

    one, two = model(batch(rank, model))
    (Within.apply(one, try_twice) + two).backward()


def slope(model: Heads, rank: int, step: int) -> Tensor:
    """A penalty on the gradient with respect to the input."""
    x = batch(rank, model, step)
    (gradient,) = torch.autograd.grad(model(x)[0], x, create_graph=True)
    return (gradient.norm() - 1).square()


def penalty(model: Heads, other: Heads, rank: int) -> None:
    (model(batch(rank, model))[1] + slope(model, rank, 1)).backward()


def penalty_apart(model: Heads, other: Heads, rank: int) -> None:
    """Its backward may come to a parameter before anything else of the model."""
    slope(model, rank, 1).backward()
    model(batch(rank, model))[1].backward()
    slope(model, rank, 2).backward()


def penalty_last(model: Heads, other: Heads, rank: int) -> None:
    """Another backward comes between, and its own comes twice."""
    late = slope(model, rank, 1)
    model(batch(rank, model))[1].backward()
    late.backward(retain_graph=True)
    late.backward()


def with_a_graph(model: Heads, other: Heads, rank: int) -> None:
    x = batch(rank, model)
    model(x)[0].backward(create_graph=True)
    assert x.grad is not None
    (x.grad.norm() - 1).square().backward()


def partly_without(model: Heads, other: Heads, rank: int) -> None:
    with torch.no_grad():
        target, _ = model(batch(rank, model, 1))
        x = model.blocks[0](batch(rank, model))
    one, two = model(x)
    (one * target + two).backward()


WAYS: dict[str, Way] = {
    "twice": twice,
    "twice, reentrant": recomputed(twice, "reentrant"),
    "twice, recomputed": recomputed(twice, "other"),
    "two losses": two_losses,
    "two losses, reentrant": recomputed(two_losses, "reentrant"),
    "two losses, recomputed": recomputed(two_losses, "other"),
    "in any order": in_any_order,
    "part of a graph": part_of_a_graph,
    "inside another": inside_another,
    "inside its own": inside_its_own,
    "amid another": amid_another,
    "failed inside": failed_inside,
    "penalty": penalty,
    "penalty apart": penalty_apart,
    "penalty last": penalty_last,
    "with a graph": with_a_graph,
    "partly without": partly_without,
}
COMPILED = ("in any order", "inside another")
FEW = ("twice", "two losses, reentrant", "in any order", "amid another", "failed inside", "penalty last")


def averaged(context: Context, way: Way, models: Sequence[Heads]) -> None:
    """Leave in `grad` what data parallel training has, the mean over ranks."""
    for rank in range(context.size):
        copies = [copy.deepcopy(model) for model in models]
        way(copies[0], copies[1], rank)
        for model, copied in zip(models, copies, strict=True):
            for parameter, other in zip(model.parameters(), copied.parameters(), strict=True):
                if other.grad is not None:
                    part = other.grad.detach() / context.size
                    parameter.grad = part if parameter.grad is None else parameter.grad + part
        for parameter in copies[0].parameters():
            parameter.grad = None  # of with_a_graph: a cycle


def difference(engine: zero.Engine, expected: Heads) -> float:
    """The largest, of any gradient; infinite where only one has it."""
    found = 0.0
    for name, parameter in expected.named_parameters():
        value = engine.full_gradient(name)
        if value is not None and parameter.grad is not None:
            found = max(found, float((value.cpu() - parameter.grad).abs().max()))
        elif value is not parameter.grad:
            return float("inf")
    return found


SETTINGS: dict[str, dict[str, Any]] = {
    "stage 3": {},
    "stage 2": {"stage": 2},
    "stage 1": {"stage": 1},
    "accumulate locally": {"accumulate": "local"},
}


def ways_body(context: Context, ways: Sequence[str], settings: dict[str, dict[str, Any]]) -> dict[str, float]:
    """The differences from unsharded training, by way and settings."""
    found = {}
    for name in ways:
        torch.manual_seed(0)
        models = Heads(), Heads()
        plain = [copy.deepcopy(model) for model in models]
        averaged(context, WAYS[name], plain)
        for told, given in settings.items():
            trained = [copy.deepcopy(model) for model in models]
            config = zero.Config(timeout=20, **given)
            engines = [zero.initialize(model, adamw(model), config) for model in trained]
            WAYS[name](trained[0], trained[1], context.rank)
            found[f"{name}, {told}"] = max(map(difference, engines, plain))
            assert engines[0].step()
    return found


@pytest.mark.slow
def test_gradients_are_those_of_unsharded_training(cluster: Clusters, abilities: Abilities) -> None:
    """A few ways with every setting, and every way at stage 3 and, on the host, at stage 2."""
    others = [name for name in WAYS if name not in FEW]
    often = {name: SETTINGS[name] for name in ("stage 3", "stage 2")[: 1 if abilities.apart else 2]}
    for ways, settings in ((FEW, SETTINGS), (others, often)):
        for found in cluster(2).run(ways_body, ways=ways, settings=settings, limit=120):
            assert {name: off for name, off in found.items() if off > 1e-6} == {}


@pytest.mark.slow
@pytest.mark.host
def test_one_rank_has_the_gradients_of_unsharded_training(cluster: Clusters) -> None:
    (found,) = cluster(1).run(ways_body, ways=FEW, settings={"stage 3": {}})
    assert {name: off for name, off in found.items() if off > 1e-6} == {}


def compiled_body(context: Context) -> dict[str, float]:
    from torch._functorch import config  # slow to import

    settings = {"compiled": {"compile": zero.Compile(inner="aot_eager")}}
    with config.patch(donated_buffer=False):  # else torch refuses retain_graph
        return ways_body(context, COMPILED, settings)


@pytest.mark.slow
def test_compiled(cluster: Clusters) -> None:
    for found in cluster(2).run(compiled_body, limit=200):
        assert {name: off for name, off in found.items() if off > 1e-6} == {}


def graph_body(context: Context) -> list[str]:
    model = Heads()
    zero.initialize(model, adamw(model), zero.Config(timeout=20))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with_a_graph(model, model, context.rank)
    return [str(warning.message) for warning in caught]


def test_that_gradients_of_parameters_have_no_graph_is_told(cluster: Clusters) -> None:
    (messages,) = cluster(1).run(graph_body)
    assert sum("has no graph" in message for message in messages) == 1
