"""zero.integrations.transformers trains, evaluates, saves and resumes as Trainer does with DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from accelz.conformance.cluster import Clusters
from tests.frameworks import trainer_runs as runs
from tests.frameworks.jobs import assert_same_log, furthest
from tests.zero.helpers.failing import TIMEOUT, Ended, Job, ended_jobs
from zero.integrations.transformers import PRIVATE

FP16 = {"fp16": True, "learning_rate": 1e-3, "optim": "adamw_torch"}
"""With a fused optimizer, Accelerate does not see which steps are skipped, and the plain rate goes on."""
WAYS: dict[str, dict[str, Any]] = {
    "every_batch": {},
    "windows": {"settings": {"gradient_accumulation_steps": 3, "eval_strategy": "epoch"}},
    "checkpointing": {"settings": {"gradient_checkpointing": True, "label_smoothing_factor": 0.1}},
    "grouped": {"settings": {"train_sampling_strategy": "group_by_length", "neftune_noise_alpha": 5.0}},
    "compiled": {
        "settings": {"torch_compile": True, "torch_compile_backend": "eager", "num_train_epochs": 1}
    },
    "shrinking": {"settings": {"auto_find_batch_size": True, "num_train_epochs": 1}, "most_rows": 1},
    "bf16": {"settings": {"bf16": True, "max_grad_norm": 0.0, "learning_rate": 1e-3}},
    "fp16": {"settings": FP16 | {"num_train_epochs": 1}},
}
ROUNDED = {"bf16": 1e-3, "fp16": 1e-3}


@pytest.fixture(scope="module")
def plain(cluster: Clusters, tmp_path_factory: Any) -> Any:
    """What transformers' own Trainer does in each way."""
    known: dict[str, Any] = {}

    def run(way: str) -> Any:
        if way not in known:
            directory = str(tmp_path_factory.mktemp(way))
            known[way] = cluster(2).run(runs.trained, stage=None, directory=directory, **WAYS[way])
        return known[way]

    return run


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("way", WAYS)
def test_training_equals_that_of_distributed_data_parallel(
    cluster: Clusters, plain: Any, tmp_path: Path, way: str, stage: int
) -> None:
    found = cluster(2).run(runs.trained, stage=stage, directory=str(tmp_path), **WAYS[way])
    within = ROUNDED.get(way, 1e-6)
    for mine, theirs in zip(found, plain(way), strict=True):
        assert_same_log(mine["log"], theirs["log"], within, nan_ok=way == "fp16")
        assert furthest(mine["predicted"], theirs["predicted"]) < 10 * within
    assert furthest(found[0]["weights"], plain(way)[0]["weights"]) < within


def test_evaluation_before_training_changes_nothing(cluster: Clusters, plain: Any, tmp_path: Path) -> None:
    """With the Trainer of transformers 5.24, ranks on CPUs train each alone afterwards."""
    found = cluster(2).run(runs.trained, stage=3, directory=str(tmp_path), evaluate_first=True)
    for mine, theirs in zip(found, plain("every_batch"), strict=True):
        assert_same_log(mine["log"], theirs["log"], 1e-6)


@pytest.mark.parametrize(("stage", "precision"), [(2, FP16), (3, {})], ids=["fp16", "fp32"])
def test_a_resumed_log_is_that_of_the_uninterrupted_run(
    cluster: Clusters, tmp_path: Path, stage: int, precision: dict[str, Any]
) -> None:
    settings = {"gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 3} | precision
    arguments = {"stage": stage, "directory": str(tmp_path), "settings": settings}
    for rank in cluster(2).run(runs.resumed, **arguments):
        wanted, found = rank["uninterrupted"], rank["resumed"]
        assert_same_log(found["log"][:-1], wanted["log"][:-1], 0.0, nan_ok=True)
        if wanted["weights"]:
            assert furthest(found["weights"], wanted["weights"]) == 0


@pytest.mark.parametrize("save_only_model", [False, True])
def test_the_best_model_is_loaded_and_saved(cluster: Clusters, tmp_path: Path, save_only_model: bool) -> None:
    settings = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "save_total_limit": 2,
        "load_best_model_at_end": True,
        "save_only_model": save_only_model,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": True,  # so that the best one is not the last one
    }
    arguments = {"stage": 3, "settings": settings, "directory": str(tmp_path / "mine")}
    found = cluster(2).run(runs.saved, **arguments)
    wanted = cluster(2).run(runs.saved, **arguments | {"stage": None, "directory": str(tmp_path / "plain")})
    assert furthest(found[0]["loaded"], found[0]["weights"]) == 0
    assert furthest(found[0]["loaded"], wanted[0]["loaded"]) < 1e-5
    assert Path(found[0]["best"]).name == Path(wanted[0]["best"]).name != "checkpoint-14"
    assert found[0]["files"].keys() == wanted[0]["files"].keys()
    for name, files in wanted[0]["files"].items():
        replaced = {"optimizer.pt", "scheduler.pt"}
        mine = set() if save_only_model else {"zero", "latest"}
        assert set(found[0]["files"][name]) == (set(files) - replaced) | mine


def test_one_trainer_trains_again(cluster: Clusters, tmp_path: Path) -> None:
    found = cluster(2).run(runs.twice, stage=3, directory=str(tmp_path / "mine"))
    wanted = cluster(2).run(runs.twice, stage=None, directory=str(tmp_path / "plain"))
    assert_same_log(found[0]["log"], wanted[0]["log"], 1e-6)
    assert furthest(found[0]["weights"], wanted[0]["weights"]) < 1e-6


@pytest.mark.parametrize("adapter", [False, True])
def test_ranks_may_generate_unequal_lengths(cluster: Clusters, tmp_path: Path, adapter: bool) -> None:
    arguments = {"directory": str(tmp_path), "adapter": adapter}
    found = cluster(2).run(runs.generated, stage=3, **arguments)
    assert [len(row) for rank in found for row in rank] == [6, 11, 11]
    assert found == cluster(2).run(runs.generated, stage=None, **arguments)


def test_a_deepspeed_file_takes_what_is_auto_from_the_arguments(cluster: Clusters, tmp_path: Path) -> None:
    for found in cluster(2).run(runs.by_deepspeed_file, directory=str(tmp_path), bf16=False):
        assert found["found"][:-1] == found["wanted"][:-1]
        assert found["dtype"] == "torch.float32"


def test_a_deepspeed_file_with_bf16_keeps_parameters_in_it(cluster: Clusters, tmp_path: Path) -> None:
    for found in cluster(2).run(runs.by_deepspeed_file, directory=str(tmp_path), bf16=True):
        assert_same_log(found["found"][:-1], found["wanted"][:-1], 3e-2)  # those of autocast, less exact
        assert found["dtype"] == "torch.bfloat16"
        assert found["precision"] == "bf16"


def test_a_deepspeed_file_that_differs_from_the_arguments_is_refused(
    cluster: Clusters, tmp_path: Path
) -> None:
    for told in cluster(2).run(runs.by_differing_file, directory=str(tmp_path)):
        assert told.startswith("ConfigError: the DeepSpeed configuration and TrainingArguments differ")
        for each in (
            "'train_batch_size' is 16, not 4;",
            "'bf16.enabled' is True, not False;",
            "'optimizer.params.lr' is 0.0001;",
            "'optimizer.type' is 'Lamb';",
            "'scheduler.type' is 'WarmupLR'.",
        ):
            assert each in told


def test_a_sequence_to_sequence_trainer_writes_outputs_of_unequal_lengths(
    cluster: Clusters, tmp_path: Path
) -> None:
    found = cluster(2).run(runs.translated, stage=3, directory=str(tmp_path / "mine"))
    wanted = cluster(2).run(runs.translated, stage=None, directory=str(tmp_path / "plain"))
    assert_same_log(found[0]["log"], wanted[0]["log"], 1e-6)
    assert furthest(found[0]["weights"], wanted[0]["weights"]) < 1e-6
    assert [rank["predicted"] for rank in found] == [rank["predicted"] for rank in wanted]


def test_a_checkpoint_of_two_ranks_is_resumed_by_one(cluster: Clusters, tmp_path: Path) -> None:
    wanted = cluster(2).run(runs.rows_in_order, directory=str(tmp_path), resume=False)[0]
    found = cluster(1).run(runs.rows_in_order, directory=str(tmp_path), resume=True)[0]
    assert_same_log(found["log"][:-1], wanted["log"][:-1], 1e-6)
    assert furthest(found["weights"], wanted["weights"]) < 1e-6


def test_a_rank_that_is_told_to_end_has_all_save_and_stop(cluster: Clusters, tmp_path: Path) -> None:
    for found in cluster(2).run(runs.terminated, directory=str(tmp_path)):
        assert 2 <= found["step"] < 14
        assert found["found"] == found["wanted"]
        assert found["handler"]


ENDS = ("stop", "fail", "data")
"""A callback, an exception in training_step, fewer rows."""


@pytest.fixture(scope="module")
def left(cluster: Clusters, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """How the jobs end, which mostly wait."""
    arguments = {way: {"directory": str(tmp_path_factory.mktemp(way)), "timeout": TIMEOUT} for way in ENDS}
    jobs = {way: Job(2, runs.ended_alone, {"way": way, **arguments[way]}) for way in ENDS}
    return ended_jobs(cluster, jobs, together=True)


@pytest.mark.parametrize("way", ENDS)
def test_what_ends_one_rank_is_told_on_the_others(left: Ended, way: str) -> None:
    first, second = left[way]
    assert ("no such file" in second.error) == (way == "fail")
    assert "rank 1" in f"{first.value}{second.value}"


def test_private_names_of_transformers_are_there() -> None:
    gone = [name for name in PRIVATE if not hasattr(transformers.Trainer, name)]
    assert not gone, f"transformers {transformers.__version__} has no Trainer.{gone}: see where they are used"
