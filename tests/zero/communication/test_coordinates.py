"""Failures of ranks in a mesh, which messages name by their coordinates."""

from __future__ import annotations

import re
from datetime import timedelta

import torch
from torch import nn

import accelz
import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.meshes import Stage, mesh_of, tokens
from tests.zero.helpers.optimizers import sgd
from tests.zero.helpers.told import Heard, raised


def named_body(context: Context) -> str:
    """A rank of another stage raises instead of stepping."""
    mesh = mesh_of(("pp", 2), ("dp", 2))
    model = Stage(mesh.get_local_rank("pp"))
    config = zero.Config(timeout=2, clip_norm=1.0, local_modules={"*": "pp"})
    engine = zero.initialize(model, sgd(model), config, mesh=mesh, data_dims="dp")
    engine.backward(model(tokens(0, engine.rank).to(engine.device)))
    return "" if context.rank == 3 else raised(engine.step)


def absent_body(context: Context) -> str:
    """A rank is missed that has the same data."""
    mesh = mesh_of(("pp", 2), ("tp", 2), ("dp", 1))
    model = Stage(mesh.get_local_rank("pp"))
    config = zero.Config(timeout=2, local_modules={"*": "pp"})
    communicator = zero.initialize(model, sgd(model), config, mesh=mesh, data_dims="dp")._communicator
    both = communicator.alike
    sums = torch.zeros(1, device=accelz.current().device)
    return "" if context.rank == 3 else raised(lambda: communicator.all_reduce("norms", sums, both).wait())


def caught_body(context: Context) -> tuple[str, list[str]]:
    """Ranks of one stage disagree, catch that, and go on; those of the other wait for them in a step. Another
    timeout than before has other groups, in which nothing has failed yet."""
    mesh, heard = mesh_of(("pp", 2), ("dp", 2)), Heard()
    stage = mesh.get_local_rank("pp")
    model = Stage(stage)
    config = zero.Config(timeout=3, clip_norm=1.0, units=(nn.Linear,), local_modules={"*": "pp"})
    engine = zero.initialize(model, sgd(model), config, mesh=mesh, data_dims="dp")
    if stage:
        error = raised(lambda: engine.full_master(f"layers.layer1_{engine.rank}.weight"))
        context.group.store.set(f"caught/{context.rank}", "")
        return error, []
    engine.backward(model(tokens(0, engine.rank).to(engine.device)))
    context.group.store.wait(["caught/2", "caught/3"], timedelta(seconds=30))
    return raised(engine.step), heard.texts


def test_failures_are_named_by_coordinates(disposable: Clusters) -> None:
    ranks = disposable(4)
    said = ranks.run(absent_body, limit=60)
    assert said[:2] == ["nothing raised"] * 2
    assert "rank(s) 3 (pp 1, tp 1, dp 0) did not answer" in said[2]
    said = ranks.run(named_body, limit=60)
    for each in said[:3]:
        assert each.startswith("CommunicationError: rank "), each
        assert "3 (pp 1, dp 1)" in each
    said = ranks.run(caught_body, limit=60)
    for error, logged in said[:2]:
        assert error.startswith("CommunicationError: "), error
        (told,) = [text for text in logged if "has failed" in text]
        assert re.search(
            r"in collective \d+, .*: rank [23] \(pp 1, dp [01]\) has failed: the ranks' coll", told
        )
    assert all(error.startswith("RankMismatchError: ") for error, _ in said[2:])
