"""Shards on the host or on disk are there before their gather wants them, and go when it is done."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.compiled_models import fresh, tokens
from tests.zero.helpers.training import adamw
from tests.zero.helpers.worlds import UP_TO_TWO

STEPS = 3


def train(context: Context, tier: str, folder: str | None, compile: zero.Compile | None) -> dict[str, Any]:
    model = fresh()
    offload = zero.Offload(params=tier, path=folder)
    config = zero.Config(offload=offload, compile=compile, timeout=20)
    engine = zero.initialize(model, adamw(model), config)
    losses = []
    memory = context.accelerator.memory
    rest = []
    for step in range(STEPS):
        rest.append(memory.stats().allocated)
        loss = engine(tokens(step, context.rank, model))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        del loss
    state = {name: value.sum().item() for name, value in engine.state_dict().items()}
    graphs = () if compile is None else engine.explain().graphs
    moves = [graph.code.count("zero.reload_parameter") for graph in graphs]
    disk = engine._boundary.stores.read_ahead if tier == "disk" else None
    return {
        "values": (losses, state),
        "moves": moves,
        "back": [graph.code.count("zero.offload_parameter") for graph in graphs],
        "late": (disk.late, disk.in_time) if disk is not None else (0, 0),
        "rest": rest[-1] - rest[-2],
    }


def tiers_body(context: Context, folder: str) -> dict[str, Any]:
    aot = zero.Compile(inner="aot_eager")
    return {
        tier: [train(context, tier, folder if tier == "disk" else None, c) for c in (None, aot)]
        for tier in ("device", "host", "disk")
    }


@pytest.mark.parametrize("size", UP_TO_TWO)
def test_same_values_from_every_tier(cluster: Clusters, device: str, size: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for found in cluster(size).run(tiers_body, folder=folder, limit=180):
            values = [run["values"] for runs in found.values() for run in runs]
            assert all(value == values[0] for value in values)
            compiled = {tier: run for tier, (_, run) in found.items()}
            assert compiled["device"]["moves"] == [0, 0]
            assert (min(compiled["host"]["moves"]) > 2) == (device != "cpu")
            assert min(compiled["disk"]["moves"]) > 2
            late, in_time = compiled["disk"]["late"]
            assert late == 0 < in_time  # not even the first one of a step
            for run in compiled.values():
                assert run["back"] == run["moves"]
                if device != "cpu":
                    assert run["rest"] == 0
