"""zero.integrations.accelerate on a device that accelz has learnt of by a vendor's package.

Accelerate's own collectives, such as `gather`, need a backend of torch.distributed for the device, which this
one has not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from accelz.conformance.cluster import Cluster, Clusters
from tests.frameworks import accelerate_loops as loops
from tests.frameworks.jobs import furthest


@pytest.fixture(scope="module")
def on_sim() -> Iterator[Cluster]:
    pytest.importorskip("accelz_sim")
    made = Cluster("sim", 2)
    yield made
    made.stop()


WAYS: dict[str, dict[str, Any]] = {
    "every_batch": {"clip_norm": 0.5},
    "windows": {"settings": {"gradient_accumulation_steps": 3}, "clip_value": 1e-3, "epochs": 2},
}


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("way", WAYS)
def test_losses_are_those_of_distributed_data_parallel_on_cpus(
    on_sim: Cluster, cluster: Clusters, way: str, stage: int
) -> None:
    """Within what another device's kernels round otherwise."""
    found = on_sim.run(loops.trained, stage=stage, **WAYS[way])
    wanted = cluster(2).run(loops.trained, stage=None, **WAYS[way])
    for mine, theirs in zip(found, wanted, strict=True):
        for key, values in theirs["log"].items():
            assert mine["log"][key] == pytest.approx(values, rel=1e-6, abs=1e-6), key
    assert furthest(found[0]["weights"], wanted[0]["weights"]) < 1e-5
