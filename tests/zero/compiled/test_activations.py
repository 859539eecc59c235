"""Activations that wait on the host: the same losses, in less memory of the device."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.compiled_models import FAULTS, LENGTH, WIDTH, Block, Watched, build, fresh, tokens
from tests.zero.helpers.late_stream import run_late
from tests.zero.helpers.models import device_of
from tests.zero.helpers.training import relative_error


def moved(engine: zero.Engine) -> int:
    """Operations in the forward graph that send something away."""
    return engine.explain().graphs[0].code.count("zero.offload_tensor")


def train(engine: zero.Engine, steps: int = 2) -> tuple[list[float], int]:
    """Losses, and the device's highest point beside what was there."""
    memory, losses, peak = engine.accelerator.memory, [], 0
    for step in range(steps):
        x = tokens(step, engine.rank, engine.module, LENGTH)
        gc.collect()
        memory.reset_peak()
        before = memory.stats().allocated
        loss = engine(x)
        engine.backward(loss)
        peak = memory.stats().peak - before
        engine.step()
        losses.append(loss.item())
    return losses, peak


class Wider(Block):
    """A block that saves much for its backward, beside what attention takes while it runs."""

    def __init__(self, frozen: bool) -> None:
        super().__init__(frozen=False)
        self.second = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH).requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + self.down(F.gelu(self.up(self.second(x))))


def deep() -> nn.Module:
    model = fresh()
    model.blocks = nn.ModuleList(Wider(frozen=i == 1) for i in range(3))
    return model


def peaks_body(context: Context) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, where, fraction in (("stay", "device", 1.0), ("half", "host", 0.5), ("all", "host", 1.0)):
        engine = build(deep(), where, fraction)
        losses, peak = train(engine)
        forward, backward = engine.explain().graphs
        predicted = max(forward.live, backward.live)
        found[name] = {"losses": losses, "peak": peak, "predicted": predicted, "moved": moved(engine)}
        del engine
    return found | {"counts": context.accelerator.capabilities.counts_every_byte}


@pytest.mark.usefixtures("apart")
def test_the_peak_falls_and_losses_are_the_same(cluster: Clusters) -> None:
    for found in cluster(2).run(peaks_body, limit=180):
        stay, half, all_ = found["stay"], found["half"], found["all"]
        assert stay["losses"] == half["losses"] == all_["losses"]
        assert stay["moved"] == 0 < half["moved"] < all_["moved"]
        assert all_["peak"] < half["peak"] < stay["peak"]
        assert all_["peak"] < 0.7 * stay["peak"]
        for run in (stay, half, all_) if found["counts"] else ():
            assert 0.99 < run["peak"] / run["predicted"] < 1.01, found


def inductor_body(context: Context) -> dict[str, Any]:
    engines = {where: build(fresh(), where, inner="inductor") for where in ("device", "host")}
    losses = {where: train(engine)[0] for where, engine in engines.items()}
    return losses | {"moved": moved(engines["host"])}


@pytest.mark.usefixtures("apart", "generates_code")
def test_generated_code_sends_them_away_too(cluster: Clusters) -> None:
    (found,) = cluster(1).run(inductor_body, limit=280)
    assert found["moved"] > 0
    assert relative_error(found["host"], found["device"]) < 1e-5


def paths_body(context: Context) -> dict[str, Any]:
    """Several forwards before a backward, accumulation, other lengths, evaluation; beside eager training."""

    def losses(where: str, inner: str | None) -> list[float]:
        engine = build(fresh(), where, inner=inner, gradient_accumulation_steps=2)
        values: list[Tensor] = []
        for step in range(2):
            for part in range(2):
                thrown = engine(tokens(10 + step, context.rank, engine.module, LENGTH))
                loss = engine(tokens(2 * step + part, context.rank, engine.module, LENGTH + 64 * part))
                with torch.no_grad():
                    values.append(engine(tokens(20, context.rank, engine.module, LENGTH)))
                engine.backward(loss)
                engine.step()
                values += [thrown.detach(), loss.detach()]
        return [value.item() for value in values]

    return {"same": losses("host", "aot_eager") == losses("device", None)}


def test_any_order_of_forwards(cluster: Clusters) -> None:
    for found in cluster(1).run(paths_body, limit=180):
        assert found["same"]


def exceptions_body(context: Context) -> dict[str, Any]:
    torch.manual_seed(0)
    engine = build(Watched())
    x = torch.ones(1 << 12, 32, device=device_of(engine.module))
    before = engine(x).item()
    for where in ("forward", "backward"):
        FAULTS.add(where)
        with pytest.raises(ArithmeticError):
            engine.backward(engine(x))
        FAULTS.clear()
    after = engine(x)
    engine.backward(after)
    return {"same": before == after.item(), "moved": moved(engine), "mode": engine.explain().mode}


def test_exceptions_leave_nothing_under_way(cluster: Clusters, device: str) -> None:
    for found in cluster(2).run(exceptions_body):
        assert found["same"]
        assert found["mode"] == "graph"
        assert bool(found["moved"]) == (device != "cpu")  # on the host there is nowhere to go


def test_settings() -> None:
    with pytest.raises(zero.ConfigError, match="compile=True"):
        zero.Config(offload=zero.Offload(activations="host"))
    with pytest.raises(zero.ConfigError, match="activations"):
        zero.Offload(fraction={"activations": 0.5})
    config = zero.Config(
        compile=True, offload=zero.Offload(activations="host", fraction={"activations": 0.5})
    )
    assert config.offload.part("activations") == 0.5


def late_body(context: Context) -> dict[str, Any]:
    losses = {}
    for where, inner in (("host", "aot_eager"), ("device", None)):
        engine = build(fresh(), where, inner=inner)
        losses[where] = []
        for step in range(3):
            loss = engine(tokens(step, context.rank, engine.module, LENGTH))
            engine.backward(loss)
            engine.step()
            losses[where].append(loss.item())
    return losses


@pytest.mark.usefixtures("simulated")
def test_the_same_losses_on_a_late_stream(cluster: Clusters) -> None:
    for found in run_late(cluster, 1, late_body):
        assert found["host"] == found["device"]
