"""The engine's ranges in the simulated device's own profiler, as a vendor's shows them."""

from __future__ import annotations

import os
from unittest.mock import patch

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.models import Stack
from tests.zero.helpers.paths import decaying, straight


def profiled_body(context: Context) -> tuple[list[tuple[str, str]], list[float], int]:
    from accelz_sim import profiler

    model = Stack(layers=4)
    with patch.dict(os.environ, ZERO_RANGES="1"):
        engine = zero.initialize(model, decaying(model), zero.Config(timeout=20))
    with profiler.attached() as events:
        engine.backward(straight(model, 0, context.rank))
        engine.step()
    seen = len(events)
    engine.backward(straight(model, 1, context.rank))
    return [(event.kind, event.name) for event in events], [event.at for event in events], len(events) - seen


def test_the_ranges_of_a_step_are_in_its_profiler_while_it_is_attached(sim: Clusters) -> None:
    for events, times, later in sim(2).run(profiled_body):
        begun = [name for kind, name in events if kind == "begin"]
        assert sorted(begun) == sorted(name for kind, name in events if kind == "end")
        order = [begun.index(f"zero::{phase}") for phase in ("gather blocks.0", "reduce blocks.0", "step")]
        assert order == sorted(order)
        assert times == sorted(times)
        assert later == 0
