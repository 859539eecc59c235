"""TRL's trainers train under zero.integrations as with DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trl.distributed
import trl.generation.vllm_generation
import trl.trainer.callbacks

from accelz.conformance.cluster import Clusters
from tests.frameworks import trl_runs as runs
from tests.frameworks.jobs import assert_same_log, furthest


def assert_equal(found: Any, wanted: Any, within: float) -> None:
    assert_same_log(found[0]["log"], wanted[0]["log"], within)
    assert furthest(found[0]["weights"], wanted[0]["weights"]) < (within if within == 1e-3 else 1e-6)


@pytest.fixture(scope="module")
def plain(cluster: Clusters, tmp_path_factory: Any) -> Any:
    """What TRL's own trainers do."""
    known: dict[tuple[Any, ...], Any] = {}

    def run(body: Any, **arguments: Any) -> Any:
        key = (body.__name__, *map(str, arguments.values()))
        if key not in known:
            directory = str(tmp_path_factory.mktemp(body.__name__))
            known[key] = cluster(2).run(body, stage=None, directory=directory, **arguments)
        return known[key]

    return run


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    ("settings", "adapter"),
    [
        ({}, False),
        ({"bf16": True}, True),
        ({}, True),
        ({"packing": True, "activation_checkpointing": True}, False),
    ],
    ids=["plain", "bf16_adapter", "adapter", "packing"],
)
def test_supervised_fine_tuning_equals_that_of_distributed_data_parallel(
    cluster: Clusters, plain: Any, tmp_path: Path, settings: dict[str, Any], adapter: bool, stage: int
) -> None:
    arguments = {"settings": settings, "adapter": adapter}
    found = cluster(2).run(runs.fine_tuned, stage=stage, directory=str(tmp_path), **arguments)
    wanted = plain(runs.fine_tuned, **arguments)
    within = 1e-3 if "bf16" in settings else 1e-6
    assert_equal(found, wanted, within)
    assert furthest(found[0]["saved"], wanted[0]["saved"]) < within


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("reference", ["given", "sharded", "synced", "own", "adapter"])
def test_preference_optimization_equals_that_of_distributed_data_parallel(
    cluster: Clusters, plain: Any, tmp_path: Path, reference: str, stage: int
) -> None:
    """At stage 3 the reference is sharded, too."""
    arguments = {"reference": reference}
    found = cluster(2).run(runs.preferred, stage=stage, directory=str(tmp_path), **arguments)
    assert_equal(found, plain(runs.preferred, **arguments), 1e-5)
    assert found[0]["sharded"] == (stage == 3 and reference != "adapter")


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("reference", ["none", "synced", "adapter"])
def test_generating_as_one_trains_equals_distributed_data_parallel(
    cluster: Clusters, plain: Any, tmp_path: Path, reference: str, stage: int
) -> None:
    """So do the weights that are sent to vLLM, with the adapter merged."""
    arguments = {"reference": reference}
    found = cluster(2).run(runs.reinforced, stage=stage, directory=str(tmp_path), **arguments)
    wanted = plain(runs.reinforced, **arguments)
    assert_equal(found, wanted, 1e-5)
    assert furthest(found[0]["sent"], wanted[0]["sent"]) < 1e-6
    assert len(found[0]["sent"]) == 21
    assert furthest(found[0]["after"], found[0]["weights"]) <= (0 if stage == 3 else 1e-6)
    assert found[1]["sent"] == {}


@pytest.mark.parametrize("stage", [2, 3])
def test_reward_modelling_equals_that_of_distributed_data_parallel(
    cluster: Clusters, plain: Any, tmp_path: Path, stage: int
) -> None:
    found = cluster(2).run(runs.judged, stage=stage, directory=str(tmp_path))
    assert_equal(found, plain(runs.judged), 1e-5)


def test_names_of_trl_are_there() -> None:
    used = {
        trl.distributed.DistributedBackend: "gather_params",
        trl.trainer.callbacks.SyncRefModelCallback: "sync_target_model",
        trl.generation.vllm_generation.VLLMGeneration: "sync_weights",
    }
    gone = [f"{kind.__name__}.{name}" for kind, name in used.items() if not hasattr(kind, name)]
    assert not gone, f"trl {trl.__version__} has no {gone}: see zero.integrations.trl"
