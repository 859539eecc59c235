"""What save_checkpoint promises its caller: names, rotation, one write of everything, errors on all ranks."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.loops import train_on
from tests.zero.helpers.models import LanguageModel, fresh, language_loss
from tests.zero.helpers.saving import BrokenStorage, engine_of, train
from tests.zero.helpers.told import raised
from tests.zero.helpers.training import adamw
from zero.files.reader import complete, find
from zero.files.storage import DISK
from zero.files.stream import CHUNK


def rotation_body(context: Context, runs: str) -> list[list[str]]:
    engine = engine_of(context)
    seen = []
    for name, keep_last in [
        ("a", 2),
        ("best", None),
        ("b", 2),
        ("c", 2),
        ("d", 1),
        ("e", 3),
        ("e", 3),
        ("f", None),
    ]:
        train(engine, context)
        engine.save_checkpoint(Path(runs, name), keep_last=keep_last)
        seen.append([*complete(Path(runs), DISK), find(Path(runs)).name])
    return seen


def test_rotation_removes_what_was_saved_for_it_and_latest_is_the_newest(
    cluster: Clusters, tmp_path: Path
) -> None:
    for seen in cluster(2).run(rotation_body, runs=str(tmp_path)):
        assert seen == [
            ["a", "a"],
            ["a", "best", "best"],
            ["a", "b", "best", "b"],
            ["b", "best", "c", "c"],
            ["best", "d", "d"],
            ["best", "d", "e", "e"],
            ["best", "d", "e", "e"],
            ["best", "d", "e", "f", "f"],
        ]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best", "d", "e", "f", "latest"]


def errors_body(context: Context, runs: str) -> dict[str, Any]:
    engine = engine_of(context)
    train(engine, context)
    good, bad = Path(runs, "good"), Path(runs, "bad")
    engine.save_checkpoint(good)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "disk")
    denied = PermissionError(errno.EACCES, os.strerror(errno.EACCES), "disk")
    messages: dict[str, Any] = {}
    engine._checkpoints.storage = BrokenStorage(full if context.rank else None)
    messages["full"] = raised(lambda: engine.save_checkpoint(bad))
    engine._checkpoints.storage = BrokenStorage(denied if not context.rank else None)
    messages["denied"] = raised(lambda: engine.save_checkpoint(bad))
    messages["in the background"] = raised(lambda: engine.save_checkpoint(bad, async_=True))
    train(engine, context)
    messages["later"] = raised(lambda: engine.save_checkpoint(bad))
    engine.save_checkpoint(good, async_=True)
    messages["waiting"] = raised(engine.wait_for_checkpoint)
    messages["once"] = raised(engine.wait_for_checkpoint)
    engine._checkpoints.storage = DISK
    messages["left"] = sorted(os.listdir(runs))
    messages["file in the way"] = raised(lambda: engine.save_checkpoint(good / "manifest.json" / "x"))
    Path(runs, "mine").mkdir(exist_ok=True)
    Path(runs, "mine", "thesis.txt").write_text("years of work")
    messages["not ours"] = raised(lambda: engine.save_checkpoint(Path(runs, "mine")))
    messages["parent"] = raised(lambda: engine.save_checkpoint(runs))
    messages["latest"] = raised(lambda: engine.save_checkpoint(Path(runs, "latest")))
    messages["hidden"] = raised(lambda: engine.save_checkpoint(Path(runs, ".x")))
    messages["keep"] = raised(lambda: engine.save_checkpoint(good, keep_last=0))
    messages["state"] = raised(lambda: engine.save_checkpoint(bad, {"x": {1, 2}}))
    own = {"x": object() if context.rank else 1}
    messages["rank state"] = raised(lambda: engine.save_checkpoint(bad, rank_state=own))
    engine.load_checkpoint(runs)
    messages["steps"] = engine.steps
    engine.save_checkpoint(Path(runs, "empty"))
    return messages


def test_errors_reach_every_rank_and_leave_what_was_there(cluster: Clusters, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    first, second = cluster(2).run(errors_body, runs=str(tmp_path))
    assert first["state"].startswith("UsageError: state['x'] is a set")
    assert second["state"] == first["state"].replace("UsageError: ", "UsageError: rank 0: ")
    assert second["rank state"].startswith("UsageError: rank_state['x'] is a object")
    assert first["rank state"] == second["rank state"].replace("UsageError: ", "UsageError: rank 1: ")
    for found in (first, second):
        assert found["full"].startswith("CheckpointError: rank 1 could not save its part of the checkpoint: ")
        assert "No space left on device" in found["full"]
        assert "CheckpointError: rank 0" in found["denied"]
        assert "Permission denied" in found["denied"]
        assert found["in the background"] == "nothing raised"
        assert found["later"] == found["waiting"] == found["denied"]
        assert found["once"] == "nothing raised"
        assert found["left"] == ["empty", "good", "latest"]
        assert found["file in the way"].endswith("manifest.json exists but is not a directory")
        assert "exists and is not a checkpoint, so it was left untouched" in found["not ours"]
        assert "exists and is not a checkpoint, so it was left untouched" in found["parent"]
        assert "cannot name a checkpoint" in found["latest"]
        assert "cannot name a checkpoint" in found["hidden"]
        assert "keep_last must be at least 1" in found["keep"]
        assert found["steps"] == 1
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"


def micro_batch_body(context: Context, runs: str) -> str:
    engine = engine_of(context, gradient_accumulation_steps=2)
    train_on(engine, language_loss(engine.module, 0, context.rank))
    message = raised(lambda: engine.save_checkpoint(Path(runs, "c")))
    engine.zero_grad()
    engine.save_checkpoint(Path(runs, "c"))
    return message


def test_between_micro_batches_there_is_nothing_whole_to_save(cluster: Clusters, tmp_path: Path) -> None:
    for message in cluster(2).run(micro_batch_body, runs=str(tmp_path)):
        assert "gradients would be lost" in message


def two_engines_body(context: Context, runs: str) -> list[str]:
    """Two saves in one directory at a time; each engine's files stay its own."""
    engines = [engine_of(context), engine_of(context, stage=0)]
    gate = threading.Event()
    for number, engine in enumerate(engines):
        engine._checkpoints.storage = BrokenStorage(gate=gate)
        engine.save_checkpoint(Path(runs, f"model-{number}"), async_=True)
    while len([n for n in os.listdir(runs) if n.endswith(".zero-new")]) < 2:
        time.sleep(0.001)
    third = engine_of(context)
    same = raised(lambda: third.save_checkpoint(Path(runs, "model-0")))
    gate.set()
    for engine in engines:
        engine.wait_for_checkpoint()
    return [same, *complete(Path(runs), DISK)]


def test_two_saves_at_a_time_do_not_disturb_each_other(cluster: Clusters, tmp_path: Path) -> None:
    for same, *found in cluster(2).run(two_engines_body, runs=str(tmp_path)):
        assert "another save of" in same
        assert found == ["model-0", "model-1"]


def unsavable_body(context: Context, path: str) -> str:
    engine = engine_of(context)
    with pytest.raises(zero.UsageError) as caught:
        engine.save_checkpoint(path, {"x": {1, 2}})
    return str(caught.value)


def test_every_rank_knows_what_rank_0_cannot_save(cluster: Clusters, tmp_path: Path) -> None:
    first, second = cluster(2).run(unsavable_body, path=str(tmp_path / "c"))
    assert first.startswith("state['x'] is a set")
    assert second == f"rank 0: {first}"


def clamp(engine: zero.Engine) -> None:
    with torch.no_grad():
        next(p for g in engine.optimizer.param_groups for p in g["params"] if p.numel()).clamp_(-0.1, 0.1)


UNFIT: dict[str, tuple[dict[str, Any], str]] = {
    "state": ({"state": ["epoch", 3]}, "UsageError: {}state must be a dict, got list"),
    "rank_state": ({"rank_state": [3]}, "UsageError: {}rank_state must be a dict, got list"),
    "keep_last": ({"keep_last": 0}, "UsageError: {}keep_last must be at least 1"),
    "no name": ({"path": "latest"}, "UsageError: {}'"),
    "no path": ({"path": 3}, "CheckpointError: rank {} could not save its part of the checkpoint: TypeError"),
    "not refreshed": ({"before": clamp}, "UsageError: {}values in optimizer.param_groups were changed"),
}


def one_rank_body(context: Context, runs: str, which: str, wrong: int, async_: bool) -> dict[str, Any]:
    engine = engine_of(context)
    train(engine, context)
    change, good = dict(UNFIT[which][0]), Path(runs, "good")
    engine.save_checkpoint(good)
    before, path = change.pop("before", None), change.pop("path", Path(runs, "bad"))
    if context.rank == wrong:
        if before is not None:
            before(engine)
    else:
        path, change = Path(runs, "bad"), {}
    began = time.monotonic()

    def save() -> None:
        engine.save_checkpoint(path, async_=async_, **change)
        engine.wait_for_checkpoint()

    said = raised(save)
    seconds = time.monotonic() - began
    if before is clamp:
        engine.refresh_weights()
    left = sorted(os.listdir(runs))
    engine.save_checkpoint(good)
    return {"said": said, "seconds": seconds, "left": left}


@pytest.mark.parametrize("async_", [False, True])
@pytest.mark.parametrize("wrong", [0, 1])
@pytest.mark.parametrize("which", UNFIT)
def test_what_one_rank_alone_cannot_save_is_told_on_every_rank_at_once(
    cluster: Clusters, tmp_path: Path, which: str, wrong: int, async_: bool
) -> None:
    results = cluster(2).run(one_rank_body, runs=str(tmp_path), which=which, wrong=wrong, async_=async_)
    expected = UNFIT[which][1]
    for rank, found in enumerate(results):
        if "rank {}" in expected:
            assert found["said"].startswith(expected.format(wrong))
        else:
            assert found["said"].startswith(expected.format("" if rank == wrong else f"rank {wrong}: "))
        assert found["seconds"] < 9  # the timeout is 10, and a connection to the store may take 5
        assert found["left"] == ["good", "latest"]


def other_names_body(context: Context, runs: str, async_: bool) -> list[str]:
    engine = engine_of(context)
    train(engine, context)
    layer, other = (f"blocks.{number}.*" for number in (0, 1))  # of as many names each
    told = []
    for include in (layer if context.rank else other, [layer, other] if context.rank else layer, layer):

        def save(include: str | list[str] = include) -> None:
            engine.save_checkpoint(Path(runs, "a"), include=include, async_=async_)

        told.append(raised(save))
        assert len(told) == 3 or not os.listdir(runs)
    engine.wait_for_checkpoint()
    return told


@pytest.mark.parametrize("async_", [False, True])
def test_ranks_that_would_save_other_names_are_told(cluster: Clusters, tmp_path: Path, async_: bool) -> None:
    for *refused, last in cluster(2).run(other_names_body, runs=str(tmp_path), async_=async_):
        for said in refused:
            assert said.startswith("RankMismatchError: rank 1 would save ")
            assert said.endswith("every rank must pass the same trainable_only and include")
        assert last == "nothing raised"
    assert sorted(os.listdir(tmp_path)) == ["a", "latest"]


def other_paths_body(context: Context, runs: str) -> str:
    """As with the time of day in a path."""
    engine = engine_of(context)
    return raised(lambda: engine.save_checkpoint(Path(runs, f"at-{context.rank}")))


def test_paths_that_differ_are_told_on_every_rank(cluster: Clusters, tmp_path: Path) -> None:
    for told in cluster(2).run(other_paths_body, runs=str(tmp_path)):
        assert "at-0" in told
        assert "at-1" in told
        assert "every rank must pass the same path" in told
    assert os.listdir(tmp_path) == []


def dead_rank_body(context: Context, runs: str, async_: bool) -> str:
    engine = zero.initialize(model := fresh(), adamw(model), zero.Config(timeout=6))
    engine.save_checkpoint(Path(runs, "before"))
    if context.rank:
        os._exit(1)
    engine.save_checkpoint(Path(runs, "after"), async_=async_)
    engine.wait_for_checkpoint()
    return "nothing raised"


@pytest.mark.parametrize("async_", [False, True])
def test_a_dead_rank_is_named(cluster: Clusters, tmp_path: Path, async_: bool) -> None:
    first, second = cluster(2).outcomes(dead_rank_body, runs=str(tmp_path), async_=async_)
    assert second.status == "died"
    assert first.error.startswith(
        "CommunicationError: while saving a checkpoint, rank 0 gave up after 1 s waiting for 'join' from "
        "rank(s) 1: rank 1 (process "
    )
    assert " ended; look at the output of those ranks first" in first.error
    assert complete(tmp_path, DISK) == ["before"]
    assert sorted(os.listdir(tmp_path)) == ["before", "latest"]
    cluster(1).run(one_more_body, runs=str(tmp_path))


def one_more_body(context: Context, runs: str) -> None:
    model = LanguageModel()
    zero.initialize(model, adamw(model), zero.Config(timeout=10)).load_checkpoint(runs)


def written_once_body(context: Context, path: str, stage: int) -> int:
    engine = engine_of(context, stage=stage)
    engine.save_checkpoint(path)
    return sum(p.numel() for p in engine.module.parameters() if p.requires_grad)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_everything_is_written_once_spread_over_the_ranks(
    cluster: Clusters, tmp_path: Path, stage: int
) -> None:
    """And another program can read it: safetensors, JSON."""
    path = tmp_path / "c"
    trainable = cluster(3).run(written_once_body, path=str(path), stage=stage)[0]
    manifest = json.loads((path / "manifest.json").read_text())
    sizes: list[int] = []
    for entry in manifest["files"]:
        with safe_open(path / entry["name"], "pt") as file:
            names = set(file.keys())
            sizes.append(sum(file.get_tensor(n).numel() for n in names if n.startswith("optimizer/exp_avg/")))
    assert sum(sizes) == trainable
    assert max(sizes) < 0.5 * trainable
    assert manifest["parameters"][-1]["unit"] == "<root>"
    tied = next(p for p in manifest["parameters"] if p["name"] == "embedding.weight")
    assert tied["aliases"] == ["head.weight"]
    for name, tensor in manifest["tensors"].items():
        for number, start, length, offset, _ in tensor["slices"]:
            entry = manifest["files"][number]
            with safe_open(path / entry["name"], "pt") as file:
                values = file.get_tensor(name)
            raw = (path / entry["name"]).read_bytes()[
                offset : offset + values.numel() * values.element_size()
            ]
            assert len(values) == length
            assert start + length <= max(1, torch.Size(tensor["shape"]).numel())
            assert values.view(torch.uint8).numpy().tobytes() == raw


def peak_body(context: Context, path: str) -> tuple[int, int]:
    """The largest host buffer that a save asks for, and the bytes it writes."""
    engine = engine_of(context)
    asked = []
    empty = context.accelerator.memory.empty_host

    def counted(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        asked.append(torch.Size(shape).numel() * dtype.itemsize)
        return empty(shape, dtype)

    engine.accelerator.memory.empty_host = counted  # type: ignore[method-assign]
    try:
        engine.save_checkpoint(path)
    finally:
        del engine.accelerator.memory.empty_host
    return max(asked, default=0), CHUNK


def test_a_save_needs_one_chunk_of_memory_at_most(cluster: Clusters, tmp_path: Path) -> None:
    for asked, chunk in cluster(2).run(peak_body, path=str(tmp_path / "c")):
        assert asked <= chunk
