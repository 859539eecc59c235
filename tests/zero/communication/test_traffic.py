"""The counts and bytes of collectives per step equal the arithmetic; and the schedule behind them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.models import Stack
from tests.zero.helpers.paths import decaying, straight

LAYERS = 4


def traffic_body(context: Context, **settings: Any) -> dict[str, Any]:
    torch.manual_seed(5)
    model = Stack(layers=LAYERS)
    engine = zero.initialize(model, decaying(model), zero.Config(timeout=10, **settings))
    steps = []
    for step in range(3):
        engine.traffic.clear()
        engine.backward(straight(model, step, context.rank))
        engine.step()
        steps.append((dict(engine.traffic.calls), dict(engine.traffic.bytes)))
    sizes = {u.name: [g.layout.numel for g in u.groups] for u in engine.units}
    return {"steps": steps, "sizes": sizes}


def expected(
    sizes: dict[str, list[int]], stage: int, item: int, first: bool, prefetch: int
) -> dict[str, Any]:
    """Whole-buffer bytes per step, with each group in a call of its own.

    Stage 3 gathers every unit for forward and for backward. From the second step on, units that the recorded
    order says are needed again at once (the root and, with prefetch, the last block) are kept in between.
    """
    groups = [numel for unit in sizes.values() for numel in unit]
    whole = (len(groups), sum(groups) * item)
    if stage == 0:
        return {"all_reduce": whole}
    scatter = {"reduce_scatter": whole}
    if stage < 3:
        return {**scatter, "all_gather": whole}
    blocks = 0 if first else (prefetch + 1) // 2  # uses of a block are two events apart for each behind it
    kept = [*sizes["<root>"] * (not first), *sizes["blocks.0"] * blocks]
    return {**scatter, "all_gather": (2 * whole[0] - len(kept), 2 * whole[1] - sum(kept) * item)}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("settings", "item"),
    [
        ({"stage": 0}, 4),
        ({"stage": 1}, 4),
        ({"stage": 2}, 4),
        ({"stage": 3}, 4),
        ({"stage": 3, "precision": "bf16"}, 2),
        ({"stage": 3, "prefetch": 0}, 4),
        ({"stage": 3, "prefetch": 2}, 4),
    ],
)
def test_counts_and_bytes(cluster: Clusters, size: int, settings: dict[str, Any], item: int) -> None:
    for found in cluster(size).run(traffic_body, **settings):
        for index, (calls, nbytes) in enumerate(found["steps"]):
            wanted = expected(
                found["sizes"], settings["stage"], item, index == 0, settings.get("prefetch", 1)
            )
            calls.pop("broadcast", None)  # the order of gradients, once, in the first step
            assert calls == {op: count for op, (count, _) in wanted.items()}, index
            assert {op: nbytes[op] for op in wanted} == {op: size for op, (_, size) in wanted.items()}


def test_one_rank_communicates_nothing(cluster: Clusters) -> None:
    (found,) = cluster(1).run(traffic_body, stage=3)
    assert found["steps"] == [({}, {})] * 3


def accumulation_body(context: Context, **settings: Any) -> list[dict[str, int]]:
    torch.manual_seed(5)
    model = Stack(layers=LAYERS)
    config = zero.Config(gradient_accumulation_steps=2, timeout=10, **settings)
    engine = zero.initialize(model, decaying(model), config)
    counts = []
    for step in range(4):
        engine.traffic.clear()
        engine.backward(straight(model, step, context.rank))
        engine.step()
        counts.append({k: v for k, v in engine.traffic.calls.items() if k != "broadcast"})
    return counts[2:]


def test_local_accumulation_reduces_once_per_step(cluster: Clusters) -> None:
    units = LAYERS + 1
    first, second = cluster(2).run(accumulation_body, stage=2, accumulate="local")[0]
    assert (first.get("reduce_scatter", 0), second["reduce_scatter"]) == (0, units)
    first, second = cluster(2).run(accumulation_body, stage=2, accumulate="sharded")[0]
    assert (first["reduce_scatter"], second["reduce_scatter"]) == (units, units)
    first, second = cluster(2).run(accumulation_body, stage=0, accumulate="local")[0]
    assert (first.get("all_reduce", 0), second["all_reduce"]) == (0, units)


def persistent_body(context: Context) -> dict[str, Any]:
    torch.manual_seed(5)
    model = Stack(layers=LAYERS)
    engine = zero.initialize(model, decaying(model), zero.Config(persistent_below=100, timeout=10))
    before = model.scale.sum().item()  # readable at any time
    counts = []
    for step in range(3):
        engine.traffic.clear()
        engine.backward(straight(model, step, context.rank))
        engine.step()
        counts.append(dict(engine.traffic.calls))
    return {"counts": counts[-1], "before": before, "after": model.scale.sum().item()}


def test_persistent_parameters_stay_gathered(cluster: Clusters) -> None:
    """Blocks are gathered twice, except the last, which is kept; the persistent unit once, after the step."""
    for found in cluster(2).run(persistent_body):
        assert found["counts"]["all_gather"] == 2 * LAYERS - 1 + 1
        assert found["before"] == 12.0
        assert found["after"] != 12.0
