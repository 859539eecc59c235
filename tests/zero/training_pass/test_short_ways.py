"""How far it is from autograd to the collective that reduces a unit's gradients."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
import torch

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.models import Stack, features
from tests.zero.helpers.training import adamw


def way_here() -> list[tuple[str, str]]:
    """The file and function of each of zero's frames, outwards from the caller's caller to autograd."""
    way: list[tuple[str, str]] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not frame.f_globals["__name__"].startswith("torch.autograd"):
        if frame.f_globals["__name__"].startswith("zero."):
            way.append((frame.f_globals["__name__"], frame.f_code.co_name))
        frame = frame.f_back
    assert frame is not None, "autograd has not led here"
    return way


def reductions_body(context: Context) -> list[list[tuple[str, str]]]:
    model = Stack()
    engine = zero.initialize(model, adamw(model), zero.Config(timeout=20))
    collectives = engine.accelerator.collectives
    ways: list[list[tuple[str, str]]] = []
    reduce_scatter = collectives.reduce_scatter

    def noted(*args: Any, **kwargs: Any) -> Any:
        if torch._C._current_graph_task_id() >= 0:  # else autograd has run, and what is left follows
            ways.append(way_here())
        return reduce_scatter(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(collectives, "reduce_scatter", noted)
        for step in range(2):  # the first learns the order of reductions
            ways.clear()
            engine.backward(model(features(step, context.rank, model), (0, 1, 2, 3)).loss)
            engine.step()
    return ways


def test_from_autograd_to_a_reduction(cluster: Clusters) -> None:
    """At most eight calls, each of which goes down: hook, pass, reducer, communicator."""
    for ways in cluster(2).run(reductions_body):
        assert len(ways) >= 2
        for way in ways:
            assert len(way) <= 8, way
            rooms = list(dict.fromkeys(name.split(".")[1] for name, _ in reversed(way)))
            assert rooms == ["training_pass", "gradients", "communication"], way
            assert len({name for name, _ in way}) <= 4, way


def gradients_body(context: Context) -> list[int]:
    """How many of zero's functions run for each gradient, in a backward."""
    model = Stack()
    engine = zero.initialize(model, adamw(model), zero.Config(timeout=20))
    running: list[FrameType] = []  # zero's, from a hook on a parameter inwards
    counts: list[int] = []

    def follow(frame: FrameType, event: str, _: Any) -> None:
        if event == "return" and running and running[-1] is frame:
            running.pop()
        elif event == "call" and frame.f_globals["__name__"].startswith("zero."):
            if not running and frame.f_code.co_name == "receive":
                counts.append(0)
            elif not running:
                return
            running.append(frame)
            counts[-1] += 1

    loss = model(features(0, context.rank, model), (0, 1, 2, 3)).loss
    sys.setprofile(follow)
    try:
        engine.backward(loss)
    finally:
        sys.setprofile(None)
    return counts


def test_from_autograd_to_a_gradients_place(cluster: Clusters) -> None:
    """Four calls, of a gradient that is not the first or last of its unit: hook, pass, group, and one that
    looks whether anything is switched on around them."""
    for counts in cluster(2).run(gradients_body):
        assert min(counts) == 4, counts
