"""When gradients of a unit are reduced: once, when they are complete, however many backwards there are."""

from __future__ import annotations

import copy
import re
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.models import WIDTH, Block, features
from tests.zero.helpers.paths import (
    Optionals,
    decaying,
    plain_loss,
)
from tests.zero.helpers.training import adamw, relative_error, state_error, train_averaging, train_zero


class Remembering(nn.Module):
    """A model whose memory of the previous step is detached inside, so it is not part of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(WIDTH) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        memory = self.layers[0](memory.detach() + x)
        return self.layers[1](x) * self.scale, self.layers[0](memory)


class Alive(torch.autograd.Function):
    """Counts the autograd graphs that exist."""

    count = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Alive.count += 1
        weakref.finalize(ctx, Alive.gone)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient

    @staticmethod
    def gone() -> None:
        Alive.count -= 1


def graphs_body(context: Context, name: str) -> list[int]:
    """The number of graphs that exist after each step."""
    model = Remembering()
    engine = zero.initialize(model, decaying(model), zero.Config(timeout=10))
    memory = features(9, context.rank, model)
    alive = []
    Alive.count = 0
    for step in range(5):
        output, new = model(features(step, context.rank, model), memory)
        memory = Alive.apply(new)
        if name == "a gradient in the middle":
            torch.autograd.grad(memory.square().sum(), new)
            memory = memory.detach()
        else:
            engine.backward(output.square().mean())
            engine.step()
        del output, new
        alive.append(Alive.count)
    return alive


@pytest.mark.parametrize("name", ["what is handed on", "a gradient in the middle"])
def test_graphs_do_not_live_on(cluster: Clusters, name: str) -> None:
    for alive in cluster(2).run(graphs_body, name=name):
        assert max(alive) <= 1, alive


class Sides(nn.Module):
    """Blocks that share one input; their backwards end one by one, not all together."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.heads = nn.ModuleList(Block(WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return torch.stack([head(x) for head in self.heads]).square().mean()


def order_body(context: Context, thrown_away: bool) -> list[str]:
    """The gathers and reductions that the backward of the second step issues.

    thrown_away: before each step, run another forward whose output only one rank keeps.
    """
    torch.manual_seed(2)
    model = Sides()
    engine = zero.initialize(model, decaying(model), zero.Config(timeout=10, prefetch=0))
    issued: list[str] = []
    kept = []
    for step in range(2):
        other = model(features(step + 50, context.rank, model)) if thrown_away else None
        kept += [other] if context.rank == 0 else []
        loss = model(features(step, context.rank, model))
        before = engine._communicator.issued
        engine.backward(loss)
        log = engine._communicator.ledger.line.issued
        issued = [each.text for each in log if each.number > before and "exchange" not in each.text]
        engine.step()
    ops = {"all_gather": "gather", "reduce_scatter": "reduce"}
    told = (re.match(r"(\w+) of unit '(.*)'", text) for text in issued)
    names = (f"{ops[found[1]]} {found[2]}" for found in told if found)
    return list(dict.fromkeys(names))  # matrices and vectors travel separately


@pytest.mark.parametrize("thrown_away", [False, True])
def test_units_on_one_input_are_reduced_one_by_one(cluster: Clusters, thrown_away: bool) -> None:
    expected = ["reduce heads.3"]
    for index in (2, 1, 0):
        expected += [f"gather heads.{index}", f"reduce heads.{index}"]
    for issued in cluster(2).run(order_body, thrown_away=thrown_away):
        assert [what for what in issued if "heads" in what] in (expected, ["gather heads.3", *expected])


def two_backwards_body(context: Context) -> tuple[float, list[int]]:
    """Two forwards before two backwards, as with two losses.

    Returns the error, and how many reductions each backward has issued before its end.
    """
    torch.manual_seed(2)
    model = Optionals("in a row")
    plain = copy.deepcopy(model)
    config = zero.Config(timeout=10, gradient_accumulation_steps=2)
    engine = zero.initialize(model, decaying(model), config)
    optimizer = decaying(plain)
    early = []
    finish = engine._reducer.finish_backward

    def counting(agree: bool) -> None:
        early.append(engine.traffic.calls["reduce_scatter"])
        finish(agree)

    engine._reducer.finish_backward = counting  # type: ignore[method-assign]
    for step in range(3):
        use = context.rank == step % 2
        losses = [model(features(step + at, context.rank, model), use) for at in (0, 10)]
        for loss in losses:
            engine.traffic.clear()
            engine.backward(loss)
        engine.step()
        for rank in range(context.size):
            for at in (0, 10):
                batch = features(step + at, rank, plain)
                (plain(batch, rank == step % 2) / (2 * context.size)).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = engine.state_dict()
    expected = plain.state_dict()
    return state_error(state, expected) if state else 0.0, early


def test_two_forwards_before_two_backwards(cluster: Clusters) -> None:
    """A backward waits for the calls that are part of it, and for no others."""
    for error, early in cluster(2).run(two_backwards_body):
        assert error < 1e-5
        assert min(early) >= 5, "layers are reduced while the backward runs"


class Viewed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x).view(-1, 2, WIDTH // 2)


class ChangedInPlace(nn.Module):
    """A unit's output is a view and is changed in place, after which it has another producer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Viewed() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            y = layer(x)
            y += 1
            x = y.reshape(-1, WIDTH)
        return x.square().mean()


class CalledTwiceInside(nn.Module):
    """A unit that is called twice in a part that a nested backward recomputes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block(WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(lambda h, layer=layer: layer(layer(h)), x, use_reentrant=True)
        return x.square().mean()


def reductions_body(context: Context, kind: type[nn.Module]) -> tuple[float, int]:
    """The error of the losses, and how many reductions a step has."""
    torch.manual_seed(2)
    model = kind()
    reference = train_averaging(context, model, plain_loss, decaying, steps=3)
    engine = zero.initialize(model, decaying(model), zero.Config(timeout=10, precision="fp32"))
    losses = []
    for step in range(3):
        engine.traffic.clear()
        loss = plain_loss(model, step, context.rank)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return relative_error(losses, reference.losses), engine.traffic.calls["reduce_scatter"]


@pytest.mark.parametrize("kind", [ChangedInPlace, CalledTwiceInside])
def test_each_unit_is_reduced_once(cluster: Clusters, kind: type[nn.Module]) -> None:
    for error, reductions in cluster(2).run(reductions_body, kind=kind):
        assert error < 1e-5
        assert reductions == 2 * 4, "matrices and vectors of four units"


class Returning(nn.Module):
    """A layer of the root is recomputed, and called once more before or after that; the rest is frozen."""

    def __init__(self, before: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(2)).requires_grad_(False)
        self.between = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.before = before

    def forward(self, x: Tensor) -> Tensor:
        if self.before:
            x = self.blocks[0](torch.tanh(self.shared(x.requires_grad_())))
            x = checkpoint(self.shared, x, use_reentrant=True)
        else:
            x = checkpoint(self.shared, x.requires_grad_(), use_reentrant=True)
            x = self.shared(torch.tanh(self.between(x)))
        return self.blocks[1](x).square().mean()


def returning_body(context: Context, before: bool) -> float:
    torch.manual_seed(2)
    model = Returning(before)
    reference = train_averaging(context, model, plain_loss, steps=4)
    run = train_zero(context, model, plain_loss, zero.Config(timeout=10), steps=4)
    return relative_error(run.losses, reference.losses)


@pytest.mark.parametrize("before", [True, False])
def test_gradients_of_a_backward_in_the_backward_do_not_end_the_outer_one(
    cluster: Clusters, before: bool
) -> None:
    """The root is needed again although all its parameters have their gradients already."""
    assert max(cluster(2).run(returning_body, before=before)) < 1e-5


class Conditioned(nn.Module):
    """Blocks that pass on, unchanged, a tensor that is older than their input."""

    def __init__(self, returns: bool) -> None:
        super().__init__()
        self.condition = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(_Conditioned(returns) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        condition = self.condition(x)
        x = torch.tanh(x)
        for block in self.blocks:
            x, condition = block(x * 1.0, condition)
        return x.square().mean() + condition.mean()


class _Conditioned(nn.Module):
    def __init__(self, returns: bool) -> None:
        super().__init__()
        self.block = Block(WIDTH)
        self.returns = returns

    def forward(self, x: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        return self.block(x + condition), condition if self.returns else condition * 1.0


def conditioned_body(context: Context, returns: bool) -> tuple[float, int]:
    torch.manual_seed(2)
    model = Conditioned(returns)
    reference = train_averaging(context, model, plain_loss, steps=3)
    engine = zero.initialize(model, adamw(model), zero.Config(prefetch=0, timeout=10))
    losses = []
    for step in range(3):
        engine.traffic.clear()
        loss = plain_loss(model, step, context.rank)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return relative_error(losses, reference.losses), engine.traffic.calls["all_gather"]


def test_what_a_unit_passes_on_does_not_bring_it_back(cluster: Clusters) -> None:
    """The gradient of what it passes on is ready when the unit's backward is over."""
    for returned, made in zip(
        cluster(2).run(conditioned_body, returns=True),
        cluster(2).run(conditioned_body, returns=False),
        strict=True,
    ):
        assert max(returned[0], made[0]) < 1e-5
        assert returned[1] == made[1]
