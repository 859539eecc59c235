"""Modules inside a unit that are called by another way than through it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.models import device_of
from tests.zero.training import adamw, scaled_error

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
    for step in range(6):
        with torch.autocast(device_of(module).type, torch.bfloat16, enabled=autocast):
            loss = engine(batch(step, context.rank, module)).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        with torch.no_grad():
            losses.append(engine(batch(9, context.rank, module)).mean().item())
    return losses


WAYS = [(0, None), (None, 0), (2, 1), (1, 1)]


def lent_body(context: Context) -> list[tuple[bool, float, dict[str, Any]]]:
    """Whether values were cast, the error of training with shards, and the model."""
    found = []
    for before, after in WAYS:
        for recomputed in (False, True):
            model = {"before": before, "after": after, "recomputed": recomputed}
            accumulated = {"gradient_accumulation_steps": 2} if recomputed else {}
            for autocast in (False, True):
                whole, sharded = (
                    trained(context, model, autocast, stage=stage, **accumulated) for stage in (0, 3)
                )
                found.append((autocast, scaled_error(sharded, whole), model))
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_training_is_that_of_whole_parameters(cluster: Clusters, size: int) -> None:
    """Bit for bit; under autocast, gradients of the two uses are added up before or after they are cast."""
    for found in cluster(size).run(lent_body, limit=60):
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
    engine.backward(engine(x).square().mean() + inner(x).square().mean())
    engine.step()
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
