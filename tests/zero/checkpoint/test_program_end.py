"""What a rank in the middle of a background save does when its program has failed."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.saving import BrokenStorage, engine_of
from tests.zero.helpers.told import raised
from zero.files.reader import complete
from zero.files.storage import DISK

pytestmark = [pytest.mark.slow, pytest.mark.host]  # starts programs

ENDS = """
import sys, threading, time
from zero.checkpoint.save_messages import program_failed

def later():
    threading.main_thread().join()
    print(program_failed())

try:
    raise KeyError
except KeyError:
    print(program_failed())
threading.Thread(target=later).start()
"""


@pytest.mark.parametrize(
    ("end", "failed"), [("raise ValueError", True), ("sys.exit(1)", False), ("pass", False)]
)
def test_a_program_failed_after_an_exception_that_nothing_caught(end: str, failed: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDS + end], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.split() == ["False", str(failed)], done.stderr


def failed_program(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("zero.checkpoint.save_messages.JOIN_SECONDS", 0.2)
    for module in ("save_messages", "save_job"):
        patch.setattr(f"zero.checkpoint.{module}.program_failed", lambda: True)


def not_joined_body(context: Context, runs: str) -> str:
    """Rank 0 saves only when rank 1, whose program has failed, has given up."""
    engine, said = engine_of(context), ""
    if context.rank:
        with pytest.MonkeyPatch.context() as patch:
            failed_program(patch)
            said = raised(lambda: engine.save_checkpoint(Path(runs, "c"), async_=True))
        context.group.store.set("gave up", "")
    context.group.store.get("gave up")
    if not context.rank:
        said = raised(lambda: engine.save_checkpoint(Path(runs, "c")))
    return said


def test_a_failed_rank_does_not_wait_for_ranks_that_do_not_save(cluster: Clusters, tmp_path: Path) -> None:
    for said in cluster(2).run(not_joined_body, runs=str(tmp_path)):
        assert "rank 1, whose program has failed, gave up after 1 s waiting for 'join' from" in said
    assert complete(tmp_path, DISK) == []


def written_body(context: Context, runs: str) -> str:
    """Rank 0 writes its part only when rank 1, whose program has failed, has left."""
    engine = engine_of(context)
    gate = threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        if context.rank:
            failed_program(patch)
        else:
            engine._checkpoints.storage = BrokenStorage(gate=gate)
        engine.save_checkpoint(Path(runs, "c"), async_=True)
        if context.rank:
            engine.wait_for_checkpoint()
            context.group.store.set("left", "")
        context.group.store.get("left")
        gate.set()
        return raised(engine.wait_for_checkpoint)


def test_a_failed_rank_leaves_its_part_to_the_others(cluster: Clusters, tmp_path: Path) -> None:
    assert cluster(2).run(written_body, runs=str(tmp_path)) == ["nothing raised"] * 2
    assert complete(tmp_path, DISK) == ["c"]
