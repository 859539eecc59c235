"""Saves in the background: the moment they keep, their errors, and programs that end meanwhile."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.fingerprint import fingerprint
from tests.zero.helpers.saving import BrokenStorage, engine_of, train
from tests.zero.helpers.small_saves import contents
from tests.zero.helpers.told import Heard, raised
from zero.checkpoint import save_start
from zero.checkpoint.save_messages import JOINED, SaveMessages
from zero.files.reader import complete, find
from zero.files.storage import DISK


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
        patch.setattr("zero.checkpoint.save_job.START_SECONDS", 0.1)
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


@pytest.mark.slow
@pytest.mark.host  # of a process's end
def test_a_program_that_ends_completes_its_save(device: str, tmp_path: Path) -> None:
    environment = {**os.environ, "ACCELZ_DEVICE": device}
    path = tmp_path / "c"
    subprocess.run([sys.executable, "-c", ENDS_AT_ONCE, str(path)], env=environment, check=True, timeout=60)
    contents(find(tmp_path), DISK)


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
        while how.endswith("before the start") and not messages.collect(JOINED, [1])[1][0]:
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
