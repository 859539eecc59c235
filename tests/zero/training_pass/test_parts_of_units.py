"""Modules inside a unit that are called by another way than through it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.conftest import Abilities
from tests.zero.helpers.loops import train_on
from tests.zero.helpers.models import device_of
from tests.zero.helpers.training import adamw, scaled_error
from tests.zero.helpers.worlds import UP_TO_TWO

WIDTH = 16


class Block(nn.Module):
    """A layer that is scaled by an embedding of the condition, in a module two levels further in."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.ModuleDict({"embedding": nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())})

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        return x + self.layer(x) * self.scale["embedding"](condition)


class Conditioned(nn.Module):
    """Embeds the condition with the modules of some blocks, before and after the blocks run.

    Peebles and Xie, Scalable Diffusion Models with Transformers, 2023, as it is often written.
    """

    def __init__(self, before: int | None, after: int | None, recomputed: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.before, self.after, self.recomputed = before, after, recomputed

    def forward(self, x: Tensor) -> Tensor:
        condition = x
        if self.before is not None:
            condition = self.blocks[self.before].scale["embedding"](x)
        for block in self.blocks:
            if self.recomputed:
                x = checkpoint(block, x, condition, use_reentrant=False)
            else:
                x = block(x, condition)
        if self.after is not None:
            x = x * self.blocks[self.after].scale["embedding"](condition)
        return x


def batch(step: int, rank: int, on: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, WIDTH, generator=generator).to(device_of(on))


def trained(context: Context, model: dict[str, Any], autocast: bool, **settings: Any) -> list[float]:
    torch.manual_seed(3)
    module = Conditioned(**model)
    engine = zero.initialize(module, adamw(module), zero.Config(timeout=20, **settings))
    losses = []
    for step in range(4):
        with torch.autocast(device_of(module).type, torch.bfloat16, enabled=autocast):
            loss = engine(batch(step, context.rank, module)).float().square().mean()
        train_on(engine, loss)
        losses.append(loss.item())
        with torch.no_grad():
            losses.append(engine(batch(9, context.rank, module)).mean().item())
    return losses


WAYS: list[tuple[int | None, int | None]] = [(0, None), (None, 0), (2, 1), (1, 1)]


def lent_body(
    context: Context, ways: Sequence[tuple[int | None, int | None]]
) -> list[tuple[bool, float, dict[str, Any]]]:
    """Whether values were cast, the error of training with shards, and the model."""
    found = []
    for before, after in ways:
        for recomputed in (False, True):
            model = {"before": before, "after": after, "recomputed": recomputed}
            accumulated = {"gradient_accumulation_steps": 2} if recomputed else {}
            for autocast in (False, True):
                whole, sharded = (
                    trained(context, model, autocast, stage=stage, **accumulated) for stage in (0, 3)
                )
                found.append((autocast, scaled_error(sharded, whole), model))
    return found


@pytest.mark.parametrize("size", UP_TO_TWO)
def test_training_is_that_of_whole_parameters(cluster: Clusters, abilities: Abilities, size: int) -> None:
    """Bit for bit; under autocast, gradients of the two uses are added up before or after they are cast."""
    ways = WAYS[1:3] if abilities.apart else WAYS
    for found in cluster(size).run(lent_body, limit=60, ways=ways):
        for autocast, error, model in found:
            assert error <= (1e-2 if autocast else 0.0), model


def outside_body(context: Context, stage: int) -> tuple[list[bool], str]:
    torch.manual_seed(3)
    module = Conditioned(None, None, False)
    inner = module.blocks[1].scale["embedding"]
    wanted = inner(batch(0, context.rank, module))
    engine = zero.initialize(module, adamw(module), zero.Config(stage=stage, timeout=20))
    x = batch(0, context.rank, module)
    found = [torch.allclose(inner(x).cpu(), wanted, atol=1e-6)]
    train_on(engine, engine(x).square().mean() + inner(x).square().mean())
    with torch.no_grad():
        stepped = inner(x)
        found.append(not torch.allclose(stepped.cpu(), wanted, atol=1e-6))
        engine(x)
        engine.offload_states()
        found.append(all(unit.idle for unit in engine.units))
        with pytest.raises(zero.ShardedParameterError) as functional:
            _ = inner[0].weight + 1
        if stage == 3:
            found.append(torch.equal(inner(x), stepped))
        else:  # the whole buffer is not there
            with pytest.raises(zero.ShardedParameterError):
                inner(x)
    return found, str(functional.value)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_part_of_a_unit_can_be_called_alone(cluster: Clusters, stage: int) -> None:
    for found, functional in cluster(2).run(outside_body, stage=stage):
        assert set(found) == {True}
        assert "Call its module" in functional


def before(engine: zero.Engine, inner: nn.Module, step: int) -> Tensor:
    """A part, then an evaluation, then the whole."""
    x = batch(step, engine.rank, engine.module)
    with torch.no_grad():
        inner(x)
    part = inner(x)
    with torch.no_grad():
        engine(x)
    loss = (engine(x) * part).square().mean()
    engine.backward(loss)
    return loss


def two_at_once(engine: zero.Engine, inner: nn.Module, step: int) -> Tensor:
    """Two forwards before two backwards."""
    x = batch(step, engine.rank, engine.module)
    losses = [(engine(part) * inner(part)).square().mean() for part in x.chunk(2)]
    for loss in losses:
        engine.backward(loss)
    return losses[0]


def two_dtypes(engine: zero.Engine, inner: nn.Module, step: int) -> Tensor:
    """A part under autocast and without, around a forward under it."""
    x = batch(step, engine.rank, engine.module)
    kind = x.device.type
    with torch.autocast(kind, torch.bfloat16):
        first = inner(x)
        with torch.autocast(kind, enabled=False):
            second = inner(x)
        whole = engine(x)
    loss = (whole.float() * first.float() * second * inner(x)).square().mean()
    engine.backward(loss)
    return loss


COURSES = {"before": before, "two at once": two_at_once, "two dtypes": two_dtypes}


def course_body(context: Context, course: str) -> float:
    runs = []
    for stage in (0, 3):
        torch.manual_seed(3)
        module = Conditioned(None, 2, False)
        accumulated = 2 if course == "two at once" else 1
        config = zero.Config(stage=stage, timeout=20, gradient_accumulation_steps=accumulated)
        engine = zero.initialize(module, adamw(module), config)
        losses = []
        for step in range(3):
            loss = COURSES[course](engine, module.blocks[1].scale["embedding"], step)
            assert engine.step()
            losses.append(loss.item())
        assert all(unit.idle for unit in engine.units)
        runs.append(losses)
    return scaled_error(*runs)


@pytest.mark.parametrize("course", COURSES)
def test_parts_and_wholes_in_any_order(cluster: Clusters, course: str) -> None:
    for error in cluster(2).run(course_body, course=course):
        assert error <= (1e-2 if course == "two dtypes" else 0.0)


class Between(nn.Module):
    """Calls a part of a block between two calls of the block, which stays gathered for the second one."""

    def __init__(self, order: tuple[int, ...]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = self.blocks[index](x, x) if index >= 0 else x + self.blocks[index].scale["embedding"](x)
        return x


ORDERS = [(0, 1, -2, 1, 2), (0, 1, 2, -1, 0, 1, 2, -1)]


def between_body(context: Context) -> list[tuple[float, tuple[int, ...], int]]:
    found = []
    for order in ORDERS:
        for prefetch in (1, 4):
            runs = []
            for stage in (0, 3):
                torch.manual_seed(3)
                module = Between(order)
                config = zero.Config(stage=stage, prefetch=prefetch, timeout=20)
                engine = zero.initialize(module, adamw(module), config)
                losses = []
                for step in range(4):
                    loss = engine(batch(step, context.rank, module)).square().mean()
                    train_on(engine, loss)
                    losses.append(loss.item())
                runs.append(losses)
            found.append((scaled_error(*runs), order, prefetch))
    return found


def test_parts_between_calls_of_their_unit(cluster: Clusters) -> None:
    for found in cluster(2).run(between_body, limit=60):
        for error, order, prefetch in found:
            assert error == 0.0, (order, prefetch)


def conditioned(context: Context) -> tuple[zero.Engine, nn.Module, Tensor]:
    """An engine, a part of one of its units, and a batch; one step has been made."""
    torch.manual_seed(3)
    module = Conditioned(None, None, False)
    engine = zero.initialize(module, adamw(module), zero.Config(stage=3, timeout=20))
    x = batch(0, context.rank, module)
    train_on(engine, engine(x).square().mean())
    return engine, module.blocks[1].scale["embedding"], x


def evaluated_body(context: Context) -> list[int]:
    """How many units are gathered after each of three evaluations that call a part."""
    engine, inner, x = conditioned(context)
    found = []
    for _ in range(3):
        with torch.no_grad():
            engine(x)
            inner(x)
        found.append(sum(not unit.idle for unit in engine.units))
    return found


def test_evaluations_that_call_parts_leave_nothing_gathered(cluster: Clusters) -> None:
    """Only the first call of a part does, until the next forward. The second one is not yet expected."""
    for found in cluster(2).run(evaluated_body):
        assert (found[0], found[2]) == (1, 0)


def written_body(context: Context) -> list[str]:
    """Weights are written while a forward awaits its backward, and by a part itself."""
    engine, inner, x = conditioned(context)
    loss, said = engine(x).square().mean(), []
    with torch.no_grad():
        inner(x)
    with zero.gathered(inner[0].weight, write_rank=0):
        inner[0].weight.data.mul_(0.5)
    with pytest.raises(zero.UsageError) as old:
        engine.backward(loss)
    said.append(str(old.value))
    inner(x)
    inner[0].register_forward_pre_hook(lambda module, args: write(module.weight))
    with pytest.raises(zero.ModelError) as written:
        inner(x)
    return [*said, str(written.value)]


def write(weight: Tensor) -> None:
    with torch.no_grad():
        weight.add_(0)


def test_weights_that_are_written_are_told(cluster: Clusters) -> None:
    for old, written in cluster(2).run(written_body):
        assert "the weights have changed since the forward" in old
        assert "the forward writes to parameter 'blocks.1.scale.embedding.0.weight'" in written


def parametrized_body(context: Context) -> tuple[str, float]:
    """One rank reads a weight that is computed from others, outside of any forward."""
    torch.manual_seed(3)
    module = Conditioned(None, None, False)
    parametrizations.weight_norm(module.blocks[1].layer)
    engine = zero.initialize(module, adamw(module), zero.Config(stage=3, timeout=20))
    x, said = batch(0, context.rank, module), "nothing"
    if context.rank == 0:
        with pytest.raises(zero.ShardedParameterError) as caught:
            module.blocks[1].layer.weight.norm()
        said = str(caught.value)
    loss = engine(x).square().mean()
    train_on(engine, loss)
    return said, loss.item()


def test_a_parametrization_is_no_call(cluster: Clusters) -> None:
    (said, _), (nothing, _) = cluster(2).run(parametrized_body)
    assert "'blocks.1.layer.parametrizations.weight.original" in said
    assert nothing == "nothing"
