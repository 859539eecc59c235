"""What the engine does shows in profilers, phase by phase, under the names of units."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
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


class Vendor:
    """A profiler of a device's vendor, which has begins and ends in their order, by thread."""

    def __init__(self) -> None:
        self.events: list[tuple[int, str, str]] = []

    @contextmanager
    def profiler_range(self, name: str) -> Iterator[None]:
        self.events.append((threading.get_ident(), "begin", name))
        try:
            yield
        finally:
            self.events.append((threading.get_ident(), "end", name))

    def names(self) -> set[str]:
        """Of all ranges, which have to be nested in each thread."""
        open_in: dict[int, list[str]] = {}
        for thread, what, name in self.events:
            stack = open_in.setdefault(thread, [])
            if what == "begin":
                stack.append(name)
            else:
                assert stack.pop() == name
        assert not any(open_in.values())
        return {name.removeprefix("zero::") for _, _, name in self.events}


@contextmanager
def vendor_of(context: Context, asked: str, declared: bool = True) -> Iterator[Vendor]:
    """Has the device ranges in a profiler of its own; asked: ZERO_RANGES."""
    vendor, accelerator = Vendor(), context.accelerator
    capabilities = replace(accelerator.capabilities, profiler_ranges=declared)
    with (
        patch.object(accelerator, "capabilities", capabilities),
        patch.object(accelerator, "profiler_range", vendor.profiler_range),
        patch.dict(os.environ, ZERO_RANGES=asked),
    ):
        yield vendor


def asked_body(context: Context) -> tuple[set[str], set[str], set[str], list[str]]:
    """Ranges of a step in the vendor's profiler; in both while torch's runs too; and where nobody asks."""
    with vendor_of(context, "1") as vendor:
        engine = built()
        steps_of(engine, context.rank, 1)
    alone = vendor.names()
    vendor.events.clear()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        steps_of(engine, context.rank, 1)
    in_torch = {event.name for event in profiled.events() or ()}
    both = {name for name in vendor.names() if f"zero::{name}" in in_torch}
    with vendor_of(context, "0") as quiet:
        steps_of(built(), context.rank, 1)
    return alone, vendor.names(), both, sorted(quiet.names())


def test_a_vendors_profiler_has_the_ranges_where_they_are_asked_for(cluster: Clusters) -> None:
    for alone, also, both, unasked in cluster(2).run(asked_body):
        for phase in ("gather", "wait", "release", "reduce", "reduced"):
            assert {f"{phase} {unit}" for unit in UNITS} <= alone
        assert {"step", "update blocks.0"} <= alone
        assert both == also
        assert {"step", "gather blocks.3"} <= also
        assert unasked == []


def refused_body(context: Context) -> list[str]:
    """What is said where the device has no such ranges, and of another value."""
    said = []
    for asked, declared in (("1", False), ("yes", True)):
        with vendor_of(context, asked, declared), pytest.raises(zero.ConfigError) as error:
            built()
        said.append(str(error.value))
    with vendor_of(context, "", declared=False):
        built()  # nobody asks
    return said


def test_ranges_that_cannot_be_shown_are_refused(cluster: Clusters) -> None:
    ((lacking, odd),) = cluster(1).run(refused_body)
    assert "does not declare profiler_ranges: leave it out, and use torch.profiler" in lacking
    assert odd == "ZERO_RANGES is 'yes': set it to 1, or leave it out"
