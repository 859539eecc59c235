"""`zero.plan` of meshes: blocks of DTensors, experts of each rank's own, and jobs of thousands of ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.loops import train_on
from tests.zero.helpers.meshes import mesh_of, mixture, tokens
from tests.zero.helpers.played import EXPERT, HIDDEN, KEYS, LAYERS, VOCABULARY, WIDTH
from tests.zero.helpers.training import adamw

PLACES = {2340: [36, 4, 4], 4095: [63, 7, 7]}


@pytest.mark.slow
def test_any_rank_of_a_large_mesh_is_played_in_one_process() -> None:
    """4,096 ranks, 70 G parameters: layout, memory and traffic, in little time and memory."""
    command = [sys.executable, "-m", "tests.zero.helpers.played", *map(str, PLACES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = json.loads(done.stdout)
    assert found["seconds"] < 60 * len(PLACES)
    assert found["bytes"] < 2e9
    matrices = (2 * WIDTH * WIDTH + 2 * WIDTH * KEYS + 3 * WIDTH * HIDDEN) // 8
    norms, expert = 2 * WIDTH, WIDTH * EXPERT
    divided = LAYERS * matrices + 2 * VOCABULARY * WIDTH // 8
    whole = LAYERS * norms + WIDTH
    shard = (divided + whole) // 512 + LAYERS * expert // 64
    for rank, at in zip(found["ranks"], PLACES.values(), strict=True):
        assert rank["coordinate"] == at
        assert rank["units"] == LAYERS + 1
        assert rank["parameters"] == 8 * divided + whole + LAYERS * expert
        assert sorted(rank["groups"]) == sorted(
            [[norms, norms // 512, 512], [matrices, matrices // 512, 512], [expert, expert // 64, 64]]
        )
        parameters, optimizer = rank["rest"]
        assert 0 <= parameters - 2 * shard < 1000  # slices are rounded up
        assert optimizer == 6 * parameters
        sent = 2 * (divided + whole + LAYERS * expert)
        assert 0 <= rank["collectives"]["reduce_scatter"] - sent < 512 * 1000
        root = 2 * (2 * VOCABULARY * WIDTH // 8 + WIDTH)
        assert root < rank["peak"] < 14 * shard + 5 * root


def experts_body(context: Context) -> tuple[Any, Any, Any, Any]:
    """What a step moves, once the first has found the order of units, and how buffers are cut, planned and
    found."""
    mesh = mesh_of(("dp", 2), ("ep", 2))
    model = mixture(mesh.get_group("ep"))
    config = zero.Config(timeout=20, local_modules={"blocks.*.experts": "ep"})
    arranged: dict[str, Any] = {"mesh": mesh, "data_dims": ("dp", "ep")}
    with pytest.raises(zero.UsageError, match="leave ranks out"):
        zero.plan(model, adamw(model), config, ranks=4, **arranged)
    plan = zero.plan(model, adamw(model), config, **arranged)
    engine = zero.initialize(model, adamw(model), config, **arranged)
    for step in range(2):
        engine.traffic.clear()
        train_on(engine, model(tokens(step, context.rank).to(engine.device)))
    groups = [group for unit in engine._full_parameters.units for group in unit.groups]
    return (
        plan.traffic.collectives,
        dict(engine.traffic.bytes),
        [[g.numel, g.shard_numel, g.ranks] for unit in plan.units for g in unit.groups],
        [[g.layout.numel, g.layout.shard_numel, g.shards] for g in groups],
    )


def test_experts_are_planned_as_they_are_trained(cluster: Clusters) -> None:
    for planned, moved, layout, built in cluster(4).run(experts_body):
        assert planned == moved
        assert layout == built
        assert {ranks for *_, ranks in layout} == {2, 4}
