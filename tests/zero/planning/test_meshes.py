"""`zero.plan` of meshes with experts of each rank's own; large ones are in `setup/test_played.py`."""

from __future__ import annotations

from typing import Any

import pytest

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.loops import train_on
from tests.zero.helpers.meshes import mesh_of, mixture, tokens
from tests.zero.helpers.training import adamw


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
