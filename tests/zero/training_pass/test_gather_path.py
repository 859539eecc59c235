"""How long the way is from a module's pre-hook to the collective that gathers its unit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.models import Stack
from tests.zero.helpers.paths import decaying, straight

FRAMES, FILES = 8, 4
OWN = f"{Path(zero.__file__).parent}/"

Trip = list[tuple[str, str]]
"""Files and functions of zero's own, outermost first."""


def own_frames() -> Trip:
    frame, found = sys._getframe(1), []
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_filename.startswith(OWN):
            found.append((frame.f_code.co_filename.removeprefix(OWN), frame.f_code.co_name))
    return found[::-1]


def trips_body(context: Context, **settings: Any) -> list[Trip]:
    """The frames from the hook before a forward down to each all-gather of two steps."""
    torch.manual_seed(5)
    model = Stack(layers=4)
    engine = zero.initialize(model, decaying(model), zero.Config(timeout=20, **settings))
    collectives, trips = engine.accelerator.collectives, []
    all_gather = collectives.all_gather

    def recorded(*args: Any, **kwargs: Any) -> Any:
        trips.append(own_frames())
        return all_gather(*args, **kwargs)

    with patch.object(collectives, "all_gather", recorded):
        for step in range(2):
            loss = straight(model, step, context.rank)
            with patch.object(collectives, "all_gather", all_gather):
                engine.backward(loss)
                engine.step()
    return trips


def test_a_forward_gathers_by_a_short_way(cluster: Clusters) -> None:
    for settings in ({}, {"precision": "bf16"}, {"prefetch": 0}):
        for trips in cluster(2).run(trips_body, **settings):
            assert len(trips) >= 4
            for trip in trips:
                assert len(trip) <= FRAMES, trip
                assert len({file for file, _ in trip}) <= FILES + 1, trip
            assert min(len({file for file, _ in trip}) for trip in trips) <= FILES
