"""TRL's trainers train under zero.integrations as with DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from accelz.conformance.cluster import Clusters
from tests.frameworks import trl_runs as runs
from tests.frameworks.jobs import furthest


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    ("settings", "adapter"),
    [({}, False), ({}, True), ({"packing": True, "activation_checkpointing": True}, False)],
    ids=["plain", "adapter", "packing"],
)
def test_supervised_fine_tuning_equals_that_of_distributed_data_parallel(
    cluster: Clusters, tmp_path: Path, settings: dict[str, Any], adapter: bool, stage: int
) -> None:
    arguments = {"settings": settings, "adapter": adapter}
    found = cluster(2).run(runs.fine_tuned, stage=stage, directory=str(tmp_path / "mine"), **arguments)
    wanted = cluster(2).run(runs.fine_tuned, stage=None, directory=str(tmp_path / "plain"), **arguments)
    for mine, theirs in zip(found[0]["log"], wanted[0]["log"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-6, abs=1e-6)
    assert furthest(found[0]["saved"], wanted[0]["saved"]) < 1e-6


@pytest.mark.parametrize("reference", ["plain", "sharded", "synced", "adapter"])
def test_preference_optimization_equals_that_of_distributed_data_parallel(
    cluster: Clusters, tmp_path: Path, reference: str
) -> None:
    found = cluster(2).run(runs.preferred, stage=3, directory=str(tmp_path / "mine"), reference=reference)
    wanted = cluster(2).run(
        runs.preferred, stage=None, directory=str(tmp_path / "plain"), reference=reference
    )
    for mine, theirs in zip(found[0]["log"], wanted[0]["log"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-6)
    assert furthest(found[0]["weights"], wanted[0]["weights"]) < 1e-6


@pytest.mark.parametrize("stage", [2, 3])
def test_generating_as_one_trains_equals_distributed_data_parallel(
    cluster: Clusters, tmp_path: Path, stage: int
) -> None:
    found = cluster(2).run(runs.reinforced, stage=stage, directory=str(tmp_path / "mine"))
    wanted = cluster(2).run(runs.reinforced, stage=None, directory=str(tmp_path / "plain"))
    for mine, theirs in zip(found[0]["log"], wanted[0]["log"], strict=True):
        mine, theirs = ({k: v for k, v in log.items() if "time" not in k} for log in (mine, theirs))
        assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-6)
    assert furthest(found[0]["weights"], wanted[0]["weights"]) < 1e-6


def test_reward_modelling_equals_that_of_distributed_data_parallel(cluster: Clusters, tmp_path: Path) -> None:
    found = cluster(2).run(runs.judged, stage=3, directory=str(tmp_path / "mine"))
    wanted = cluster(2).run(runs.judged, stage=None, directory=str(tmp_path / "plain"))
    for mine, theirs in zip(found[0]["log"], wanted[0]["log"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-6)
    assert furthest(found[0]["weights"], wanted[0]["weights"]) < 1e-6
