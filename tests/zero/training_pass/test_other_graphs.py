"""Ranks that make the same calls, of which their losses depend on different ones."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.conftest import Abilities
from tests.zero.helpers.models import WIDTH, Block, features
from tests.zero.helpers.paths import decaying, error_of
from tests.zero.helpers.training import (
    check_order,
    collected,
    living,
    state_error,
    train_averaging,
    train_zero,
)
from zero.training_pass.call import Call


class TwoOutputs(nn.Module):
    """A block that has an older and a newer output, and a unit inside that comes between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(WIDTH, WIDTH), Block(WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        early = self.first(x)
        return early, self.inner(x + early.detach())


class Nulled(nn.Module):
    """A block that may give a parameter in place of what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.null = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(1, WIDTH))

    def forward(self, x: Tensor, drop: bool) -> Tensor:
        return self.null if drop else self.layer(x)


class Passing(nn.Module):
    """A block that may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, drop: bool) -> Tensor:
        return x if drop else self.layer(x)


class Branches(nn.Module):
    """Two stacks of units and some more, put together in the way of that name. here: this rank differs."""

    def __init__(self, way: str, frozen: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.encoder = nn.ModuleList(Block(WIDTH) for _ in range(2))
        self.decoder = nn.ModuleList(Block(WIDTH) for _ in range(2))
        self.pairs = nn.ModuleList(TwoOutputs() for _ in range(2))
        self.nulled, self.passing = Nulled(), nn.ModuleList(Passing() for _ in range(2))
        self.null = nn.Parameter(torch.zeros(1, WIDTH))
        self.way = way
        for name in frozen:
            self.get_submodule(name).requires_grad_(False)

    def forward(self, x: Tensor, here: bool) -> Tensor:
        return getattr(self, self.way)(x, here)

    def dropped(self, x: Tensor, here: bool) -> Tensor:
        condition = self._run(self.encoder, self.first(x))
        return self._run(self.decoder, x + (self.null if here else condition)).square().mean()

    def detached(self, x: Tensor, here: bool) -> Tensor:
        condition = self._run(self.encoder, self.first(x))
        return self._run(self.decoder, condition.detach() if here else condition).square().mean()

    def masked(self, x: Tensor, here: bool) -> Tensor:
        """The newest calls are the ones that are left out."""
        main = self._run(self.decoder, self.first(x))
        other = self._run(self.encoder, x)
        return main.square().mean() + (0 if here else other.square().mean())

    def exits(self, x: Tensor, here: bool) -> Tensor:
        """Each rank takes its loss from another depth."""
        outputs = [x]
        for block in (*self.encoder, *self.decoder):
            outputs.append(block(outputs[-1]))
        return outputs[2 if here else 4].square().mean()

    def several_outputs(self, x: Tensor, here: bool) -> Tensor:
        for pair in self.pairs:
            early, late = pair(x)
            x = early if here else late
        return x.square().mean()

    def recomputed(self, x: Tensor, here: bool) -> Tensor:
        condition = self.first(x)
        for block in self.encoder:
            condition = checkpoint(block, condition, use_reentrant=False)
        return self._run(self.decoder, x + (self.null if here else condition)).square().mean()

    def parameter_instead(self, x: Tensor, here: bool) -> Tensor:
        return self._run(self.decoder, x + self.nulled(self.first(x), here)).square().mean()

    def left_out_first(self, x: Tensor, here: bool) -> Tensor:
        """What is left out is behind nothing that is trained."""
        for block in self.passing:
            x = block(x, here)
        return self._run(self.decoder, x).square().mean()

    def repeated(self, x: Tensor, here: bool) -> Tensor:
        """The same units before and behind the cut."""
        condition = self._run(self.encoder, self.first(x))
        return self._run(self.encoder, condition.detach() if here else condition).square().mean()

    def thrown_away(self, x: Tensor, here: bool) -> Tensor:
        self._run(self.decoder, x)
        return self.dropped(x, here)

    def prompted(self, x: Tensor, here: bool) -> Tensor:
        """What is frozen in the encoder passes gradients on, but on one rank."""
        prompt = self.first(x)
        other = self._run(self.encoder, prompt.detach() if here else prompt)
        return (self._run(self.decoder, x) + other).square().mean()

    def _run(self, blocks: nn.ModuleList, x: Tensor) -> Tensor:
        for block in blocks:
            x = block(x)
        return x


WAYS = (
    "dropped",
    "detached",
    "masked",
    "exits",
    "several_outputs",
    "recomputed",
    "parameter_instead",
    "left_out_first",
    "repeated",
    "thrown_away",
    "prompted",
)


def differs(step: int, rank: int) -> bool:
    """In every other step one rank, in turns."""
    return step % 2 == 1 and rank == step // 2 % 2


def whole(model: nn.Module, step: int, rank: int) -> Tensor:
    loss: Tensor = model(features(step, rank, model), differs(step, rank))
    return loss


def units(name: str, module: nn.Module) -> bool:
    return isinstance(module, Block | TwoOutputs | Nulled | Passing)


def two_forwards(model: nn.Module, step: int, rank: int) -> Tensor:
    """Of two whole forwards, only one is in the loss."""
    first: Tensor = model(features(step, rank, model), False)
    second: Tensor = model(features(step + 50, rank, model), False)
    return first if differs(step, rank) else first + second


def by_parts(model: nn.Module, step: int, rank: int) -> Tensor:
    """Units are called one by one, not through the model."""
    assert isinstance(model, Branches)
    x = condition = features(step, rank, model)
    for block in model.encoder:
        condition = block(condition)
    for block in model.decoder:
        x = block(x if differs(step, rank) else x + condition)
    return x.square().mean()


SETTINGS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "prefetch 0": {"prefetch": 0},
    "prefetch 3": {"prefetch": 3},
    "small ones stay": {"persistent_below": 20},
}
FEW = ("dropped", "several_outputs", "recomputed", "prompted")
"""The ways of other settings and sizes. The host takes every way where it gathers late, too."""


def errors_of_way(
    context: Context,
    way: str,
    names: Iterable[str] = ("as it is",),
    loss: Callable[[nn.Module, int, int], Tensor] = whole,
    frozen: tuple[str, ...] = (),
) -> dict[str, float]:
    """By settings' names."""
    torch.manual_seed(3)
    model = Branches(way, frozen)
    reference = train_averaging(context, model, loss, decaying, steps=4)
    errors = {}
    for name in names:
        config = zero.Config(timeout=10, units=units, **SETTINGS[name])
        run = train_zero(context, copy.deepcopy(model), loss, config, decaying, steps=4)
        errors[f"{way}, {loss.__name__}, {name}, {frozen}"] = error_of(run, reference)
    return errors


def ways_body(context: Context, ways: Sequence[str], frozen: tuple[str, ...] = ()) -> dict[str, float]:
    errors: dict[str, float] = {}
    for way in ways:
        errors |= errors_of_way(context, way, frozen=frozen)
    return errors


def settings_body(context: Context, every: Sequence[str]) -> dict[str, float]:
    errors: dict[str, float] = {}
    for way in WAYS:
        errors |= errors_of_way(context, way, SETTINGS if way in FEW else every)
    return errors


def test_losses_that_depend_on_other_calls(cluster: Clusters, abilities: Abilities) -> None:
    """All ranks gather and reduce in one order even so, as libraries with one queue for everything need."""
    every = ["as it is"] if abilities.apart else ["as it is", "prefetch 0"]
    for found in cluster(2).run(settings_body, every=every, limit=120):
        assert max(found.values()) < abilities.close, found


@pytest.mark.parametrize(
    ("size", "frozen", "ways"),
    [
        pytest.param(3, (), FEW, marks=pytest.mark.host),
        pytest.param(2, ("first",), ("detached", "masked", *FEW), marks=pytest.mark.host),
        (2, ("encoder",), ("dropped", "detached", "recomputed", "prompted")),
    ],
)
def test_other_ranks_and_frozen_units(
    cluster: Clusters, abilities: Abilities, size: int, frozen: tuple[str, ...], ways: tuple[str, ...]
) -> None:
    for found in cluster(size).run(ways_body, frozen=frozen, ways=ways):
        assert max(found.values()) < abilities.close, found


def forwards_body(context: Context) -> dict[str, float]:
    first, second = (errors_of_way(context, "dropped", loss=loss) for loss in (two_forwards, by_parts))
    return first | second


def test_forwards_that_are_in_the_loss_of_some_ranks(cluster: Clusters, abilities: Abilities) -> None:
    for found in cluster(2).run(forwards_body):
        assert max(found.values()) < abilities.close, found


def two_backwards_body(context: Context) -> float:
    """The error after steps of two forwards and then two backwards, the newer one first; against stage 2."""
    states = []
    for stage in (2, 3):
        torch.manual_seed(3)
        model = Branches("dropped")
        config = zero.Config(stage=stage, gradient_accumulation_steps=2, units=units, timeout=10)
        engine = zero.initialize(model, decaying(model), config)
        for step in range(4):
            losses = [whole(model, each, context.rank) for each in (step, step + 1)]
            for loss in reversed(losses):
                engine.backward(loss)
                engine.step()
        states.append(engine.state_dict())
        check_order(engine)
    return state_error(states[1], states[0]) if context.rank == 0 else 0.0


def test_two_forwards_before_two_backwards(cluster: Clusters, abilities: Abilities) -> None:
    assert max(cluster(2).run(two_backwards_body)) < abilities.close


def gathers_body(context: Context) -> list[int]:
    """How often each step gathers; in every other one, no rank's loss depends on the encoder."""
    model = Branches("dropped")
    engine = zero.initialize(model, decaying(model), zero.Config(units=units, prefetch=0, timeout=10))
    counts = []
    for step in range(4):
        engine.traffic.clear()
        engine.backward(model(features(step, context.rank, model), step % 2 == 1))
        engine.step()
        counts.append(engine.traffic.calls["all_gather"])
    return counts


def test_what_no_rank_needs_is_not_gathered(cluster: Clusters) -> None:
    """Each unit has two groups. The root and four blocks in forward; in backward two blocks or four, and in
    the first step the root."""
    assert cluster(2).run(gathers_body) == [[20, 14, 18, 14]] * 2


@collected()
def turns_body(context: Context, frozen: tuple[str, ...]) -> list[int]:
    """How many calls the engine has in mind after each step."""
    model = Branches("detached", frozen)
    engine = zero.initialize(model, decaying(model), zero.Config(units=units, timeout=10))
    counts = []
    for step in range(4):
        engine.backward(model(features(step, context.rank, model), step % 2 == context.rank))
        engine.step()
        counts.append(living(Call))
    return counts


@pytest.mark.parametrize("size", [1, 2])
def test_calls_of_frozen_units_are_forgotten(cluster: Clusters, size: int) -> None:
    """No graph has them, so that no backward comes to them; every step would add some to what ranks tell
    each other."""
    for counts in cluster(size).run(turns_body, frozen=("first", "encoder")):
        assert counts == [0] * 4


def by_chunks(model: nn.Module, x: Tensor, chunks: int) -> Tensor:
    """Call a part of a block, past the block, once for each chunk."""
    assert isinstance(model, Branches)
    x = model.encoder[1](x)
    return torch.cat([model.encoder[0].norm(part) for part in x.chunk(chunks)]).square().mean()


def chunks_body(context: Context) -> tuple[str, bool]:
    """What the first step says of other numbers of chunks, and whether equal ones then work.

    The first call of a part leaves its unit whole, so that no later one gathers anything in this step.
    """
    model = Branches("dropped")
    engine = zero.initialize(model, decaying(model), zero.Config(units=units, timeout=10))
    x = features(0, context.rank, model, batch=6)
    with pytest.raises(zero.RankMismatchError) as told:
        engine.backward(by_chunks(model, x, 2 + context.rank))
    engine.backward(by_chunks(model, x, 2))
    return str(told.value), engine.step()


def test_other_numbers_of_calls_are_told_in_the_first_step(cluster: Clusters) -> None:
    for message, works in cluster(2).run(chunks_body):
        assert "call 4 is of 'encoder.0' on rank 1, which rank 0 does not have" in message
        assert "as often and in the same order" in message
        assert works
