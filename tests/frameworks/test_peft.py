"""Adapters of PEFT train, are saved and are resumed under zero.integrations as with DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
from torch import nn

from accelz.conformance.cluster import Clusters
from tests.frameworks import peft_runs as runs
from tests.frameworks.jobs import assert_same_log, furthest
from zero.whole.export import added


@pytest.mark.parametrize("kind", runs.ADAPTERS)
def test_an_adapter_is_trained_and_saved(cluster: Clusters, tmp_path: Path, kind: str) -> None:
    wanted = cluster(2).run(runs.adapted, stage=None, directory=str(tmp_path / "plain"), kind=kind)[0]
    for stage in (2, 3):
        directory = str(tmp_path / str(stage))
        check(cluster(2).run(runs.adapted, stage=stage, directory=directory, kind=kind)[0], wanted, kind)


def check(found: dict[str, Any], wanted: dict[str, Any], kind: str) -> None:
    assert_same_log(found["log"], wanted["log"], 1e-6)
    assert furthest(found["saved"], wanted["saved"]) < 1e-6
    assert furthest(found["loaded"], found["saved"]) == 0
    assert furthest(found["by_hand"], found["saved"]) == 0
    assert found["files"] == wanted["files"]
    assert found["moved"] < 2 * found["layer"] or kind == "prompt"  # the two layers of the base stay sharded


@pytest.mark.parametrize("kind", ["lora", "prompt"])
def test_a_resumed_log_is_that_of_the_uninterrupted_run(cluster: Clusters, tmp_path: Path, kind: str) -> None:
    for rank in cluster(2).run(runs.resumed, stage=3, directory=str(tmp_path), kind=kind):
        assert rank["found"] == rank["wanted"]


def test_an_adapter_that_is_not_trained_is_saved_too(cluster: Clusters, tmp_path: Path) -> None:
    found = cluster(2).run(runs.beside_another, stage=3, directory=str(tmp_path))[0]
    assert furthest(found["saved"], found["before"]) == 0


def test_an_adapter_is_merged_where_it_is(cluster: Clusters, tmp_path: Path) -> None:
    found = cluster(2).run(runs.merged, stage=3, directory=str(tmp_path / "mine"))[0]
    wanted = cluster(2).run(runs.merged, stage=None, directory=str(tmp_path / "plain"))[0]
    assert furthest(found, wanted) < 1e-6


def _unanswered() -> nn.Module:
    raise NotImplementedError  # as some of transformers' models do


@pytest.mark.parametrize("answer", [None, _unanswered])
def test_a_model_that_tells_of_no_embeddings_has_its_adapter_saved(answer: Any) -> None:
    plain = nn.Sequential(nn.Linear(2, 2))
    model: Any = peft.get_peft_model(plain, peft.LoraConfig(target_modules=["0"], r=1))
    if answer is not None:
        model.get_output_embeddings = answer
    assert added(model) == [f"base_model.model.0.lora_{side}.default.weight" for side in "AB"]
