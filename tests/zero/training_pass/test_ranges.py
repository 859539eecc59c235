"""What the engine does shows in profilers, phase by phase, under the names of units."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.autograd import profiler
from torch.profiler import ProfilerActivity, profile, record_function

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.conftest import Abilities
from tests.zero.helpers.models import Stack
from tests.zero.helpers.paths import decaying, straight
from zero.ranges import ranged

UNITS = ("<root>", "blocks.0", "blocks.3")
SAVED = {"save", "save collect", "save write", "load", "load check", "load fill"}


def built(**settings: Any) -> zero.Engine:
    torch.manual_seed(5)
    model = Stack(layers=4)
    return zero.initialize(model, decaying(model), zero.Config(timeout=20, **settings))


def steps_of(engine: zero.Engine, rank: int, count: int) -> None:
    for step in range(count):
        engine.backward(straight(engine.module, step, rank))
        engine.step()


def profiled_body(context: Context, folder: str, **settings: Any) -> set[str]:
    """The engine's ranges in a step and a save."""
    engine = built(**settings)
    steps_of(engine, context.rank, 1)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        steps_of(engine, context.rank, 1)
        engine.save_checkpoint(Path(folder) / "a")
        engine.load_checkpoint(Path(folder) / "a")
    names = (event.name for event in profiled.events() or ())
    return {name.removeprefix("zero::") for name in names if name.startswith("zero::")}


@pytest.mark.parametrize("where", ["device", "host", "disk"])
def test_every_phase_is_a_range_named_after_its_unit(
    cluster: Clusters, tmp_path: Path, abilities: Abilities, where: str
) -> None:
    offload = {"optimizer": where, "params": where, "path": str(tmp_path) if where == "disk" else None}
    every = cluster(2).run(profiled_body, folder=str(tmp_path / "saves"), offload=offload)
    assert "save publish" in every[0]
    for found in every:
        for phase in ("gather", "wait", "release", "reduce", "reduced"):
            assert {f"{phase} {unit}" for unit in UNITS} <= found, found
        assert {"step", "update blocks.0", *SAVED} <= found, found
        if where == "disk":
            assert {"read from disk", "write to disk", "wait for disk"} <= found, found
        if where == "host" and abilities.apart:  # else the device's memory is the host's
            assert "copy to host" in found, found


def unprofiled_body(context: Context) -> list[str]:
    """The ranges of the engine that are made in steps which nobody profiles."""
    engine = built()
    with patch.object(profiler, "record_function", wraps=record_function) as made:
        steps_of(engine, context.rank, 2)
    return [name for call in made.call_args_list if (name := call.args[0]).startswith("zero::")]


def test_no_range_is_made_while_nobody_profiles(cluster: Clusters) -> None:
    assert cluster(2).run(unprofiled_body) == [[], []]


def test_ranges_are_made_for_nvtx_too() -> None:
    """`emit_nvtx` sets what the ranges look at; it needs CUDA to run."""
    with patch.object(profiler, "_is_profiler_enabled", True):
        range_ = ranged("gather", "layers.3")
    assert isinstance(range_, record_function)
    assert range_.name == "zero::gather layers.3"
    assert ranged("step") is ranged("gather", "a")
