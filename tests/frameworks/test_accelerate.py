"""zero.integrations.accelerate trains, saves and loads as Accelerate does with DistributedDataParallel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate
import pytest
from accelerate.optimizer import AcceleratedOptimizer

from accelz.conformance.cluster import Clusters
from tests.frameworks import accelerate_loops as loops
from tests.frameworks.jobs import furthest
from tests.zero.helpers.failing import TIMEOUT, Ended, Job, ended_jobs
from zero.integrations.accelerate import PRIVATE

WAYS: dict[str, dict[str, Any]] = {
    "every_batch": {"clip_norm": 0.5, "epochs": 2},
    "windows": {"settings": {"gradient_accumulation_steps": 3}, "clip_norm": 0.5, "epochs": 2},
    "synced_windows": {"settings": {"gradient_accumulation_steps": 2}, "clip_value": 1e-3},
    "bf16": {"settings": {"mixed_precision": "bf16"}, "epochs": 2},
}


def assert_equal(found: list[dict[str, Any]], wanted: list[dict[str, Any]], within: float) -> None:
    """The logs of all ranks, and rank 0's weights; other ranks of an engine have none."""
    for mine, theirs in zip(found, wanted, strict=True):
        for key, values in theirs["log"].items():
            assert mine["log"][key] == pytest.approx(values, rel=within, abs=within), key
    assert furthest(found[0]["weights"], wanted[0]["weights"]) < within
    assert not any(each["weights"] for each in found[1:])


@pytest.fixture(scope="module")
def plain(cluster: Clusters) -> Any:
    """What Accelerate's own Accelerator does in each way."""
    known: dict[str, Any] = {}

    def run(way: str) -> Any:
        if way not in known:
            known[way] = cluster(2).run(loops.trained, stage=None, **WAYS[way])
        return known[way]

    return run


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("way", WAYS)
def test_training_equals_that_of_distributed_data_parallel(
    cluster: Clusters, plain: Any, way: str, stage: int
) -> None:
    found = cluster(2).run(loops.trained, stage=stage, **WAYS[way])
    assert_equal(found, plain(way), within=1e-3 if way == "bf16" else 1e-6)


@pytest.mark.parametrize(
    "calls",
    [
        (("scheduler", "loader", "optimizer", "model"),),
        (("model",), ("optimizer", "loader", "scheduler")),
        (("optimizer",), ("model", "loader"), ("scheduler",)),
        (),
    ],
    ids=["backwards", "model_first", "optimizer_first", "by_other_methods"],
)
def test_the_order_of_prepare_changes_nothing(cluster: Clusters, plain: Any, calls: Any) -> None:
    found = cluster(2).run(loops.trained, stage=3, calls=calls, **WAYS["windows"])
    assert_equal(found, plain("windows"), within=1e-6)


def test_one_process_trains_as_with_accelerate(cluster: Clusters) -> None:
    found, wanted = (cluster(1).run(loops.trained, stage=stage, **WAYS["windows"]) for stage in (3, None))
    assert_equal(found, wanted, within=1e-6)


def test_backwards_under_no_sync_count_for_the_step(cluster: Clusters) -> None:
    found, wanted = (cluster(2).run(loops.manual_windows, stage=stage) for stage in (3, None))
    assert_equal(found, wanted, within=1e-6)


def test_several_models_have_an_engine_each(cluster: Clusters) -> None:
    found, wanted = (cluster(2).run(loops.two_models, stage=stage) for stage in (3, None))
    assert_equal(found, wanted, within=1e-6)


@pytest.mark.parametrize("calls", [(loops.ALL_AT_ONCE,), (("optimizer",), ("model", "loader"))])
def test_a_gradient_scaler_skips_the_step_that_overflows(cluster: Clusters, calls: Any) -> None:
    found = cluster(2).run(loops.scaled, stage=3, calls=calls)
    wanted = cluster(2).run(loops.scaled, stage=None, calls=(loops.ALL_AT_ONCE,))
    assert_equal(found, wanted, within=1e-6)
    assert found[0]["log"]["skipped"] == [False, False, True, False, False, False, False]


@pytest.mark.parametrize("stage", [2, 3])
def test_metrics_have_every_row_once(cluster: Clusters, stage: int) -> None:
    found, wanted = (cluster(2).run(loops.evaluated, stage=s) for s in (stage, None))
    assert len(found[0]["rows"]) == 7
    assert found[0]["rows"] == pytest.approx(wanted[0]["rows"], rel=1e-6)


def test_a_model_without_an_optimizer_is_sharded_to_be_read(cluster: Clusters) -> None:
    found, wanted = (cluster(2).run(loops.only_read, stage=stage) for stage in (3, None))
    assert found[0]["sharded"]
    assert found[0]["loss"] == pytest.approx(wanted[0]["loss"], rel=1e-6)


def test_a_scheduler_without_a_prepared_model_steps_once(cluster: Clusters) -> None:
    alone = cluster(2).run(loops.scheduled_alone, calls=(("loader",), ("scheduler",)))
    assert alone == [[1 / 2, 1 / 3, 1 / 4]] * 2
    later = cluster(2).run(loops.scheduled_alone, calls=(("scheduler",), ("model", "optimizer")))
    assert later == [[1 / 3, 1 / 5, 1 / 7]] * 2  # as in Accelerate: once for each process


@pytest.mark.parametrize("windows", [1, 3])
def test_a_resumed_log_is_that_of_the_uninterrupted_run(
    cluster: Clusters, tmp_path: Path, windows: int
) -> None:
    for rank in cluster(2).run(loops.resumed, directory=str(tmp_path), windows=windows):
        assert rank["found"] == rank["wanted"]
        assert rank["counter"] == 5


def test_hooks_see_the_models_and_no_weights(cluster: Clusters, tmp_path: Path) -> None:
    first, second = cluster(2).run(loops.saved_with_hooks, directory=str(tmp_path))
    assert first["seen"] == {"models": 1, "weights": 0, "state": 21, "left": 0}
    assert second["seen"] == {"models": 1, "weights": 0, "state": 0, "left": 0}
    assert furthest(first["after"], first["before"]) == 0
    assert first["steps"] == 7  # those of the training after the save: weights alone were loaded
    assert first["files"] == [
        *("latest", "random_states_0.pkl", "random_states_1.pkl", "scheduler.bin", "zero_0")
    ]


def test_a_state_is_loaded_at_another_stage_and_number_of_ranks(cluster: Clusters, tmp_path: Path) -> None:
    saved = cluster(2).run(loops.saved_with_hooks, directory=str(tmp_path))[0]["before"]
    assert furthest(cluster(1).run(loops.loaded, directory=str(tmp_path))[0], saved) == 0


def test_saved_weights_are_loaded_by_accelerate(cluster: Clusters, tmp_path: Path) -> None:
    first, _ = cluster(2).run(loops.saved_model, directory=str(tmp_path))
    assert furthest(first["loaded"], first["weights"]) == 0
    assert first["unwrapped"] == "LlamaForCausalLM"
    assert (tmp_path / "model.safetensors.index.json").exists()


@pytest.fixture(scope="module")
def left(cluster: Clusters) -> Ended:
    """How the jobs end, which mostly wait."""
    jobs = {
        f"data, stage {stage}": Job(2, loops.uneven, {"stage": stage, "timeout": TIMEOUT}) for stage in (2, 3)
    }
    jobs["exception"] = Job(2, loops.failing, {"stage": 3, "timeout": TIMEOUT})
    return ended_jobs(cluster, jobs, together=True)


@pytest.mark.parametrize("stage", [2, 3])
def test_data_that_ends_earlier_on_one_rank_is_told(left: Ended, stage: int) -> None:
    first, _ = left.values_of(f"data, stage {stage}")
    kind, message, seconds = first
    assert kind in ("CommunicationError", "RankMismatchError"), message
    assert "rank 1" in message
    assert seconds < 4 * TIMEOUT


def test_an_exception_on_one_rank_ends_the_others(left: Ended) -> None:
    first, second = left["exception"]
    assert "no such file" in second.error
    assert first.status == "raised"
    assert "rank 1" in first.error


def test_what_cannot_be_is_refused(cluster: Clusters) -> None:
    for told in cluster(2).run(loops.refused):
        assert told["counted"].startswith("ConfigError: Accelerate counts micro-batches itself")
        assert told["sharded"].startswith("ConfigError: Accelerate is set up for FSDP")
        assert told["alone"].startswith("ConfigError: Accelerate has 1 processes, but the job 2 ranks")
        for name, optimizer in {"without its model": "AdamW", "of two models": "SGD"}.items():
            assert told[name].startswith("UsageError: backward() was called with an optimizer whose model")
            assert f"prepared: {optimizer}." in told[name]
        assert told["without preparing the optimizer"].startswith("UsageError: this model's engine has no")
        assert told["uneven inputs"].startswith("UsageError: join_uneven_inputs() with even_batches=False")
        assert "entered" not in told


def test_private_names_of_accelerate_are_there() -> None:
    begun = accelerate.Accelerator(cpu=True)
    gone = [name for name in PRIVATE if not hasattr(begun, name)]
    gone += {"__setstate__"} - vars(AcceleratedOptimizer).keys()
    assert not gone, f"accelerate {accelerate.__version__} has no Accelerator.{gone}: see where they are used"
