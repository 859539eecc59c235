"""Training on the only stream that the simulated device runs late, which reveals what does not wait for it.

In the other tests it is the reverse: computation happens at once, and the engine's own streams are late.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.compiled.test_activations import LENGTH, build
from tests.zero.helpers.compiled_models import fresh, tokens
from tests.zero.helpers.training import adamw
from tests.zero.optimizer import test_speculative_steps, test_streamed_records
from tests.zero.tiers import test_tiers

Body = Callable[..., dict[str, Any]]


@pytest.fixture(autouse=True)
def _a_stream_can_be_late(device: str) -> None:
    if device != "sim":
        pytest.skip("only a simulated device says which of its streams is late")


def on_a_late_stream(context: Context, inner: Body, **arguments: Any) -> dict[str, Any]:
    from accelz_sim import faults

    streams = context.accelerator.streams
    late = streams.new()
    with streams.use(late), faults.late_stream(late.native):  # type: ignore[attr-defined]
        return inner(context, **arguments)


def run_late(cluster: Clusters, size: int, body: Body, **arguments: Any) -> list[dict[str, Any]]:
    return cluster(size).run(on_a_late_stream, inner=body, limit=180, **arguments)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_tier(cluster: Clusters, tmp_path: Path, device: str, precision: str) -> None:
    for found in run_late(cluster, 2, test_tiers.tiers_body, path=str(tmp_path), precision=precision):
        test_tiers.check(found, device, 1e-5 if precision == "fp32" else 3e-2)


def test_every_setting(cluster: Clusters, tmp_path: Path, device: str) -> None:
    for found in run_late(cluster, 2, test_tiers.settings_body, path=str(tmp_path)):
        test_tiers.check(found, device, 3e-2)


def test_steps_ahead(cluster: Clusters, tmp_path: Path) -> None:
    for found in run_late(cluster, 2, test_speculative_steps.settings_body, path=str(tmp_path)):
        test_speculative_steps.check(found, wasted=False)


def test_state_that_visits(cluster: Clusters) -> None:
    for found in run_late(cluster, 2, test_streamed_records.parity_body):
        assert [name for name, equal in found.items() if not equal] == []


def activations_body(context: Context) -> dict[str, Any]:
    losses = {}
    for where in ("host", "device"):
        engine = build(fresh(), where)
        losses[where] = []
        for step in range(3):
            loss = engine(tokens(step, context.rank, engine.module, LENGTH))
            engine.backward(loss)
            engine.step()
            losses[where].append(loss.item())
    return losses


def test_compiled_activations(cluster: Clusters) -> None:
    for found in run_late(cluster, 1, activations_body):
        assert found["host"] == found["device"]


def ahead_body(context: Context) -> dict[str, tuple[bool, bool]]:
    """By unit, with shards on the host: whether the gathered values are there as soon as the gather has begun
    (which then was not beside the computation) and once it is over."""
    engine = zero.initialize(
        model := fresh(), adamw(model), zero.Config(offload=zero.Offload(params="host"), timeout=20)
    )
    found = {}
    for unit in engine.units:
        for group in unit.groups:
            cast = unit.cast_for(torch.bfloat16)
            if group.gather_format(cast).dtype is not torch.bfloat16:
                continue
            unit.start_gather(cast)
            values = group.buffer(group.gather_format(cast)).data
            early = bool(values.isfinite().any())
            unit.gather(cast)
            found[unit.name] = early, bool(values.isfinite().all())
            unit.release()
    return found


def test_shards_on_the_host_are_cast_beside_the_computation(cluster: Clusters) -> None:
    (found,) = cluster(1).run(ahead_body)
    assert len(found) > 2
    assert set(found.values()) == {(False, True)}
