"""What save_checkpoint promises its caller: names, rotation, background writing, errors on every rank."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
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
from tests.zero.helpers.fingerprint import fingerprint
from tests.zero.helpers.models import LanguageModel, fresh, language_loss
from tests.zero.helpers.saving import BrokenStorage, engine_of, train
from tests.zero.helpers.told import Heard, raised
from tests.zero.helpers.training import adamw
from zero.checkpoint import save_start
from zero.checkpoint.save_messages import JOINED, SaveMessages
from zero.files.reader import Checkpoint, complete, find
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


def background_body(context: Context, runs: str) -> dict[str, Any]:
    engine = engine_of(context)
    train(engine, context, 2)
    gate = threading.Event()
    engine._checkpoints.storage = BrokenStorage(gate=gate)
    before = fingerprint(engine)
    engine.save_checkpoint(Path(runs, "one"), {"at": engine.steps}, async_=True)
    train(engine, context, 3)  # writing has not begun
    published = Path(runs, "one").exists()
    after = fingerprint(engine)
    arena = engine._checkpoints._arena
    gate.set()
    engine.save_checkpoint(Path(runs, "two"), {"at": engine.steps}, async_=True)
    same = engine._checkpoints._arena is arena
    engine.wait_for_checkpoint()
    engine.wait_for_checkpoint()
    found = {}
    for name in ("one", "two"):
        twin = engine_of(context, stage=1)
        assert twin.load_checkpoint(Path(runs, name)).state["at"] == twin.steps
        found[name] = fingerprint(twin)
    return {
        "published": published,
        "one": found["one"] == before,
        "two": found["two"] == after,
        "one copy": same,
    }


def test_saving_in_the_background_keeps_the_moment_it_was_called(cluster: Clusters, tmp_path: Path) -> None:
    for found in cluster(2).run(background_body, runs=str(tmp_path)):
        assert found == {"published": False, "one": True, "two": True, "one copy": True}


def interrupted_start_body(context: Context, runs: str) -> dict[str, str]:
    """Ctrl-C just before the thread is there."""
    engine = engine_of(context)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.save_checkpoint(Path(runs, "a"), async_=True)
        patch.undo()
        patch.setattr("zero.checkpoint.background.START_SECONDS", 0.1)
        said = {"waiting": raised(engine.wait_for_checkpoint), "once": raised(engine.wait_for_checkpoint)}
    engine.save_checkpoint(Path(runs, "b"), async_=True)
    engine.save_checkpoint(Path(runs, "c"))
    return said


def interrupt(thread: threading.Thread) -> None:
    raise KeyboardInterrupt


def test_a_save_whose_thread_never_began_is_told_and_prevents_no_other(
    cluster: Clusters, tmp_path: Path
) -> None:
    for said in cluster(2).run(interrupted_start_body, runs=str(tmp_path)):
        assert said["waiting"].endswith(
            f"{tmp_path}/a in the background was interrupted before it began: call save_checkpoint again on "
            "every rank"
        )
        assert said["once"] == "nothing raised"
    assert complete(tmp_path, DISK) == ["b", "c"]


ENDS_AT_ONCE = """
import sys, torch, zero
model = torch.nn.Linear(2048, 1024)
engine = zero.initialize(model, torch.optim.AdamW(model.parameters()), zero.Config())
engine.save_checkpoint(sys.argv[1], async_=True)
"""


def test_a_program_that_ends_completes_its_save(device: str, tmp_path: Path) -> None:
    environment = {**os.environ, "ACCELZ_DEVICE": device}
    path = tmp_path / "c"
    subprocess.run([sys.executable, "-c", ENDS_AT_ONCE, str(path)], env=environment, check=True, timeout=60)
    with Checkpoint(find(tmp_path)) as checkpoint:
        assert list(checkpoint.verify()) == []


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


def heard_body(context: Context, runs: str, broken: int) -> list[str]:
    engine, heard = engine_of(context), Heard()
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "disk")
    engine._checkpoints.storage = BrokenStorage(full if context.rank == broken else None)
    engine.save_checkpoint(Path(runs, "c"), async_=True)
    raised(engine.wait_for_checkpoint)
    logging.getLogger("zero").removeHandler(heard)
    return heard.texts


@pytest.mark.parametrize("broken", [0, 1])
def test_a_save_that_failed_in_the_background_is_logged_by_rank_0_and_the_rank_that_failed(
    cluster: Clusters, tmp_path: Path, broken: int
) -> None:
    texts = cluster(3).run(heard_body, runs=str(tmp_path), broken=broken)
    assert [len(each) for each in texts] == ([1, 0, 0] if broken == 0 else [1, 1, 0])
    assert all(f"rank {broken} could not save its part" in text for each in texts for text in each)


def micro_batch_body(context: Context, runs: str) -> str:
    engine = engine_of(context, gradient_accumulation_steps=2)
    engine.backward(language_loss(engine.module, 0, context.rank))
    engine.step()
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


def one_refusal_body(context: Context, runs: str, how: str) -> list[str]:
    """One rank refuses its part of a save in the background, and the program goes on saving."""
    engine = engine_of(context)
    told = []
    for number in range(3):
        train(engine, context)
        refuses = number == 0 and context.rank == 1
        given: dict[str, Any] = {}
        if refuses and how in ("refuses", "interrupted"):
            given["refused"] = Interrupting() if how == "interrupted" else object()

        def save(name: str = f"s{number}", given: dict[str, Any] = given) -> None:
            engine.save_checkpoint(Path(runs, name), rank_state=given, async_=True)

        with pytest.MonkeyPatch.context() as patch:
            if number == 0 and how.startswith("interrupted in its wait"):
                interrupt_the_wait(patch, context.rank, how)
            try:
                told.append(raised(save))
            except KeyboardInterrupt:
                told.append("interrupted")
    told.append(raised(engine.wait_for_checkpoint))
    return told


def interrupt_the_wait(patch: pytest.MonkeyPatch, rank: int, how: str) -> None:
    """Interrupt rank 1 in its wait for rank 0's word, before or after rank 0 has found all ranks ready."""
    word, first_problem = save_start._word_of_rank_0, save_start._first_problem

    def interrupted(messages: SaveMessages) -> Any:
        if how.endswith("after the start"):
            word(messages)
        raise KeyboardInterrupt

    def late(messages: SaveMessages) -> Any:
        while how.endswith("before the start") and not messages.collect(JOINED, [1])[1]:
            time.sleep(0.01)
        return first_problem(messages)

    name, replacement = ("_word_of_rank_0", interrupted) if rank else ("_first_problem", late)
    patch.setattr(save_start, name, replacement)


class Interrupting:
    def state_dict(self, *_: Any) -> dict[str, Any]:
        raise KeyboardInterrupt


REFUSALS = [
    "refuses",
    "interrupted",
    "interrupted in its wait, before the start",
    "interrupted in its wait, after the start",
]


@pytest.mark.parametrize("how", REFUSALS)
def test_after_a_refusal_the_next_save_in_the_background_succeeds(
    cluster: Clusters, tmp_path: Path, how: str
) -> None:
    interrupted = how != "refuses"
    first, second = cluster(2).run(one_refusal_body, runs=str(tmp_path), how=how)
    if how.endswith("after the start"):  # rank 0's save has begun, and fails in the background
        assert first[0] == "nothing raised"
        assert second[0] == "interrupted"
        assert first[1].startswith("CheckpointError: rank 1 could not")
        assert second[1].startswith("CheckpointError: rank 0: rank 1 could not")
        assert first[2:] == second[2:] == ["nothing raised"] * 2
        assert sorted(os.listdir(tmp_path)) == ["latest", "s2"]
        return
    assert first[0].startswith(
        "CheckpointError: rank 1 could not" if interrupted else "UsageError: rank 1: rank_"
    )
    assert second[0].startswith("interrupted" if interrupted else "UsageError: rank_state")
    assert first[1:] == second[1:] == ["nothing raised"] * 3
    assert sorted(os.listdir(tmp_path)) == ["latest", "s1", "s2"]


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
