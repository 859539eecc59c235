"""Passes that end without a hook: by a KeyboardInterrupt, or removed hooks; and what only looks like one."""

from __future__ import annotations

from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.models import WIDTH, features

STEPS = 4


class Nested(nn.Module):
    """A module that calls itself, as recursive networks do. during: called inside the innermost call."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.during: list[Any] = []

    def forward(self, x: Tensor, depth: int = 1) -> Tensor:
        x = self.blocks[0](x)
        if depth:
            x = self(x, depth - 1)
        elif self.during:
            self.during.pop()()
        return self.blocks[1](x) * self.scale


def interrupt() -> None:
    raise KeyboardInterrupt


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    return functional.mse_loss(model(features(step, rank, model)).float(), features(-step, rank, model))


def train(engine: zero.Engine, rank: int, disturb: Any = lambda step: None) -> list[float]:
    losses = []
    for step in range(STEPS):
        with torch.autocast(engine.accelerator.device.type, torch.bfloat16, enabled=step == 2):
            loss = loss_of(engine.module, step, rank)
        if step == 1:
            disturb("before backward")
        engine.backward(loss)
        if step == 2:
            disturb("before step")
        engine.step()
        losses.append(loss.item())
        if step == 0:
            disturb("after step")
    return losses


def build(**config: Any) -> zero.Engine:
    torch.manual_seed(0)
    model = Nested()
    return zero.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.3), zero.Config(timeout=20, **config)
    )


def interrupted_body(context: Context, stage: int) -> dict[str, Any]:
    expected, found = train(build(stage=stage), context.rank), {}
    for when in ("after step", "before backward", "before step"):
        engine = build(stage=stage)

        def disturb(now: str, engine: zero.Engine = engine, when: str = when) -> None:
            if now == when:
                engine.module.during.append(interrupt)
                with pytest.raises(KeyboardInterrupt):
                    engine(features(9, context.rank, engine.module))

        found[when] = train(engine, context.rank, disturb) == expected
        engine.load_state_dict(engine.state_dict())
        found[when] &= not any(unit.in_use for unit in engine.units)
    engine = build(stage=stage)
    for module in engine.module.modules():
        module._forward_hooks.clear()
    found["hooks removed"] = train(engine, context.rank) == expected
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_nothing_is_stale_after_an_interrupt(cluster: Clusters, stage: int) -> None:
    for found in cluster(2).run(interrupted_body, stage=stage):
        assert all(found.values()), found


def at_the_edges_body(context: Context) -> dict[str, bool]:
    """Interrupts before autograd begins and after it is done: only the micro-batch is dropped."""
    expected, found = train(build(), context.rank), {}
    for when in ("begins", "ends"):
        engine = build()
        loss = loss_of(engine.module, 9, context.rank)
        with pytest.MonkeyPatch.context() as patched:
            if when == "begins":
                patched.setattr(engine._tracer, "mark", lambda phase, unit: interrupt())
            else:
                patched.setattr(type(engine.accelerator), "flush", lambda accelerator: interrupt())
            with pytest.raises(KeyboardInterrupt):
                engine.backward(loss)
        with pytest.raises(zero.UsageError, match="without backward"):
            engine.step()
        idle = not (engine._pass.in_backward or engine._communicator.in_pass)
        found[when] = idle and train(engine, context.rank) == expected
    return found


def test_a_backward_may_be_interrupted_at_its_edges(cluster: Clusters) -> None:
    for found in cluster(2).run(at_the_edges_body):
        assert all(found.values()), found


def nested_body(context: Context) -> list[str]:
    """A load in the middle of a forward, from this thread or another, notices that one is under way."""
    engine, found = build(), []
    expected = train(build(), context.rank)

    def load() -> None:
        try:
            engine.load_pretrained("")
        except zero.UsageError as error:
            found.append(str(error))

    def load_elsewhere() -> None:
        thread = Thread(target=load)
        thread.start()
        thread.join()

    for each in (load, load_elsewhere):
        engine.module.during.append(each)
        engine(features(9, context.rank, engine.module))
    assert train(engine, context.rank) == expected
    return found


def test_a_forward_under_way_is_no_interrupted_one(cluster: Clusters) -> None:
    for found in cluster(2).run(nested_body):
        assert found == ["load_pretrained() was called inside a forward: let it return first"] * 2


def shown_body(context: Context, stage: int) -> dict[str, Any]:
    """Forward and backward work in a `zero.gathered` block; what changes weights only works outside of it."""
    expected, engine, losses = train(build(stage=stage), context.rank), build(stage=stage), []
    whole, refused = engine.state_dict(), []
    for step in range(STEPS):
        with zero.gathered(engine.module):
            with torch.autocast(engine.accelerator.device.type, torch.bfloat16, enabled=step == 2):
                loss = loss_of(engine.module, step, context.rank)
            engine.backward(loss)
            for change in (
                engine.step,
                lambda: engine.load_state_dict(whole),
                lambda: engine.load_pretrained(""),
            ):
                with pytest.raises(zero.UsageError, match=r"inside zero.gathered: leave the block"):
                    change()
                refused.append(True)
        assert engine.step()
        losses.append(loss.item())
    return {"losses": losses, "expected": expected, "refused": len(refused)}


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_weights_that_are_shown_do_not_change(cluster: Clusters, stage: int) -> None:
    for found in cluster(2).run(shown_body, stage=stage):
        assert found["losses"] == pytest.approx(found["expected"], rel=1e-5)
        assert found["refused"] == 3 * STEPS
