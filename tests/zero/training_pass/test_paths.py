"""Models that do not run the same straight line in every step."""

from __future__ import annotations

import copy
import gc
import re
import warnings
import weakref
from collections.abc import Callable
from io import BytesIO
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.models import WIDTH, Block, LanguageModel, features, tokens
from tests.zero.helpers.paths import STRAIGHT, Optionals, decaying, error_of, fresh, optional_loss, straight
from tests.zero.helpers.training import adamw, relative_error, state_error, train_averaging, train_zero


def repeated(model: nn.Module, step: int, rank: int) -> Tensor:
    """One block is called three times, and another twice in a row."""
    return model(features(step, rank, model), (0, 1, 0, 2, 2, 3, 0)).loss


def changing_order(model: nn.Module, step: int, rank: int) -> Tensor:
    """Blocks run in another order in every step, the same on all ranks."""
    order = torch.randperm(4, generator=torch.Generator().manual_seed(step)).tolist()
    return model(features(step, rank, model), tuple(order)).loss


def some_unused(model: nn.Module, step: int, rank: int) -> Tensor:
    """Blocks that are left out in some steps, and one that is never used."""
    return model(features(step, rank, model), (0, 1, 2) if step % 3 else (0, 2)).loss


def two_forwards(model: nn.Module, step: int, rank: int) -> Tensor:
    """Two forwards, along different paths, before one backward."""
    first = model(features(step, rank, model), STRAIGHT).loss
    second = model(features(step + 100, rank, model), (3, 1)).loss
    return first + 0.5 * second


def checkpointed(model: nn.Module, step: int, rank: int) -> Tensor:
    return model(features(step, rank, model), STRAIGHT, recompute="non-reentrant").loss


def checkpointed_repeated(model: nn.Module, step: int, rank: int) -> Tensor:
    return model(features(step, rank, model), (0, 1, 0, 3), recompute="non-reentrant").loss


def reentrant(model: nn.Module, step: int, rank: int) -> Tensor:
    x = features(step, rank, model).requires_grad_()  # reentrant checkpointing needs an input with a gradient
    return model(x, STRAIGHT, recompute="reentrant").loss


def evaluation_between(model: nn.Module, step: int, rank: int) -> Tensor:
    """Evaluation without gradients, and a forward whose loss is thrown away, before the real one."""
    with torch.no_grad():
        model(features(step + 50, rank, model), (2, 0))
    model(features(step + 60, rank, model), (1, 3))
    return straight(model, step, rank)


def inference_between(model: nn.Module, step: int, rank: int) -> Tensor:
    with torch.inference_mode():
        model(features(step + 50, rank, model), STRAIGHT)
    return straight(model, step, rank)


def one_parameter_unused(model: nn.Module, step: int, rank: int) -> Tensor:
    """Part of a unit gets no gradient in some steps: it must not be stepped or decayed."""
    block = model.blocks[0]
    x = features(step, rank, model)
    assert isinstance(block, nn.Module)
    return block(x).square().mean() if step % 2 else straight(model, step, rank)


def submodule_alone(model: nn.Module, step: int, rank: int) -> Tensor:
    """A unit is called on its own, outside the model's forward."""
    return model.blocks[2](features(step, rank, model)).square().mean() + straight(model, step, rank)


PATHS: tuple[Callable[[nn.Module, int, int], Tensor], ...] = (
    straight,
    repeated,
    changing_order,
    some_unused,
    two_forwards,
    checkpointed,
    checkpointed_repeated,
    reentrant,
    evaluation_between,
    inference_between,
    one_parameter_unused,
    submodule_alone,
)


def paths_body(context: Context, stages: tuple[int, ...], prefetch: int = 1) -> dict[str, float]:
    errors = {}
    for path in PATHS:
        reference = train_averaging(context, fresh(), path, decaying, steps=8)
        for stage in stages:
            config = zero.Config(stage=stage, prefetch=prefetch, timeout=10)
            run = train_zero(context, fresh(), path, config, decaying, steps=8)
            errors[f"{path.__name__} at stage {stage}"] = error_of(run, reference)
    return errors


@pytest.mark.parametrize("size", [1, 2, 3])
def test_paths(cluster: Clusters, size: int) -> None:
    stages = (0, 1, 2, 3) if size == 2 else (3,)
    for found in cluster(size).run(paths_body, limit=150, stages=stages):
        assert max(found.values()) < 1e-5, found


@pytest.mark.parametrize("prefetch", [0, 3])
def test_paths_with_other_prefetch(cluster: Clusters, prefetch: int) -> None:
    for found in cluster(2).run(paths_body, limit=150, stages=(3,), prefetch=prefetch):
        assert max(found.values()) < 1e-5, found


def optional_body(context: Context, shape: str, persistent_below: int) -> float:
    torch.manual_seed(2)
    model = Optionals(shape)
    config = zero.Config(timeout=10, persistent_below=persistent_below)
    reference = train_averaging(context, model, optional_loss, decaying, steps=8)
    run = train_zero(context, model, optional_loss, config, decaying, steps=8)
    return error_of(run, reference)


@pytest.mark.parametrize("persistent_below", [0, 2, 20])
@pytest.mark.parametrize("shape", ["in a row", "side by side", "twice", "after one thrown away"])
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_use_different_parameters_of_a_unit(
    cluster: Clusters, size: int, shape: str, persistent_below: int
) -> None:
    """At stage 3 all ranks gather the same units, but may use different parameters inside.

    They issue collectives in one order even so, as libraries with one queue for everything need.
    """
    found = cluster(size).run(optional_body, shape=shape, persistent_below=persistent_below)
    assert max(found) < 1e-5


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
    reference = train_averaging(context, model, dropping_loss, decaying, steps=6)
    errors = []
    for prefetch in (0, 1, 3):
        config = zero.Config(timeout=10, prefetch=prefetch)
        run = train_zero(context, copy.deepcopy(model), dropping_loss, config, decaying, steps=6)
        errors.append(error_of(run, reference))
    return max(errors)


@pytest.mark.parametrize("reentrant", [False, True])
def test_ranks_that_drop_different_layers_and_recompute_the_rest(cluster: Clusters, reentrant: bool) -> None:
    """What is recomputed is already whole, so no rank gathers other units ahead for it."""
    assert max(cluster(3).run(dropping_body, reentrant=reentrant)) < 1e-5


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


def test_ranks_that_go_different_ways_within_units(cluster: Clusters) -> None:
    for found in cluster(2).run(ways_body):
        assert max(found.values()) < 1e-5, found


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


def test_a_layer_that_is_dropped_with_its_container(cluster: Clusters) -> None:
    assert max(cluster(2).run(bags_body)) < 1e-5


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
        log = engine._communicator.ledger.line.log
        issued = [text for number, text in log if number > before and "exchange" not in text]
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
def test_gradients_that_are_late_on_some_ranks(cluster: Clusters, name: str) -> None:
    """Below stage 3 ranks may use different units; gradients after a reduction wait for all ranks."""
    for found in cluster(3).run(late_body, name=name):
        assert max(found.values()) < 1e-5, found


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
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SideChannel() for _ in range(3))

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


def plain_loss(model: nn.Module, step: int, rank: int) -> Tensor:
    return model(features(step, rank, model))


def architectures_body(context: Context) -> dict[str, float]:
    errors = {}
    for kind in ARCHITECTURES:
        torch.manual_seed(2)
        model = kind()
        reference = train_averaging(context, model, plain_loss, steps=6)
        for persistent in (0, WIDTH + 1):
            config = zero.Config(persistent_below=persistent, timeout=10)
            run = train_zero(context, copy.deepcopy(model), plain_loss, config, steps=6)
            errors[f"{kind.__name__}, persistent below {persistent}"] = error_of(run, reference)
    return errors


def test_architectures(cluster: Clusters) -> None:
    for found in cluster(2).run(architectures_body):
        assert max(found.values()) < 1e-5, found


def kept_output_body(context: Context, compile: bool) -> list[bool]:
    """Whether engine and model are freed although the model keeps a tensor from its last forward."""

    def trained(backward: bool) -> tuple[weakref.ref[Any], weakref.ref[Any]]:
        torch.manual_seed(2)
        model = Mixture()
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


def rank_dependent(model: nn.Module, step: int, rank: int) -> Tensor:
    """Each rank leaves out different blocks."""
    return model(features(step, rank, model), (0, 1, 3) if (step + rank) % 2 else (2, 1)).loss


def rank_dependent_body(context: Context) -> dict[str, float]:
    errors = {}
    reference = train_averaging(context, fresh(None), rank_dependent, decaying, steps=8)
    for stage in (0, 1, 2):
        run = train_zero(
            context, fresh(None), rank_dependent, zero.Config(stage=stage, timeout=10), decaying, steps=8
        )
        errors[str(stage)] = error_of(run, reference)
    return errors


def test_ranks_that_use_different_blocks(cluster: Clusters) -> None:
    """Below stage 3 nothing is gathered in forward, so ranks may take different paths."""
    for found in cluster(2).run(rank_dependent_body):
        assert max(found.values()) < 1e-5, found


def parts_body(context: Context) -> bool:
    """Modules of the root unit are called on their own, outside the model's forward."""
    torch.manual_seed(3)
    model = LanguageModel()
    plain = copy.deepcopy(model)
    engine = zero.initialize(model, decaying(model), zero.Config(timeout=10))
    for module in (model, plain):
        batch = tokens(0, context.rank, module)
        loss = module.head(module.norm(module.blocks[0](module.embedding(batch)))).square().mean()
        if module is plain:
            loss.backward()
        else:
            engine.backward(loss)
    gradient = engine.full_gradient("embedding.weight")
    assert gradient is not None
    expected = plain.embedding.weight.grad
    torch.distributed.all_reduce(expected)
    idle = all(u.idle for u in engine.units)
    return idle and torch.allclose(gradient.cpu(), expected / context.size, rtol=1e-5, atol=1e-7)


def test_parts_of_the_root_unit_work_alone(cluster: Clusters) -> None:
    assert all(cluster(2).run(parts_body))


def lifetimes_body(context: Context) -> dict[str, Any]:
    """Which units are whole while each block runs, forward and backward."""
    model = fresh()
    engine = zero.initialize(model, decaying(model), zero.Config(prefetch=1))
    seen: list[tuple[str, ...]] = []

    def whole() -> tuple[str, ...]:
        return tuple(u.name for u in engine.units if not u.idle)

    for block in model.blocks:
        block.up.register_forward_hook(lambda m, a, o: seen.append(whole()))
        block.up.register_full_backward_hook(lambda m, a, o: seen.append(whole()))
    for step in range(3):
        seen.clear()
        engine.backward(straight(model, step, context.rank))
        between = whole()
        engine.step()
    return {"most": max(len(s) for s in seen), "calls": len(seen), "between": between, "after": whole()}


def test_units_are_released(cluster: Clusters) -> None:
    """At most the root, the unit in use, the prefetched one and the one just finished are whole."""
    for found in cluster(2).run(lifetimes_body):
        assert found["calls"] == 8
        assert found["most"] <= 4, found
        assert found["between"] == found["after"] == (), found
