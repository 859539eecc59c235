"""A saving two-rank job, killed for real at random moments, over and over in one directory.

    python -m pytest tests/zero/checkpoint/test_kills.py --kills 200 --timeout 0 -s

kills more often than the suite does, and takes a quarter of an hour.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import zero
from accelz.conformance.cluster import Cluster, Clusters, Context
from tests.zero.helpers.models import LanguageModel, fresh, language_loss
from tests.zero.helpers.small_saves import Contents, contents
from tests.zero.helpers.training import adamw
from zero.files.reader import complete, find
from zero.files.storage import DISK

pytestmark = [pytest.mark.slow, pytest.mark.host]  # starts programs

STEPS = 24  # of a run
ALONE = 0.2  # seconds that a survivor goes on


def job_body(context: Context, runs: str, keep_last: int | None) -> int:
    """Train and save after every step, going on from `latest`; every third save is synchronous."""
    resume = Path(runs, "latest").exists()
    model = LanguageModel() if resume else fresh()
    engine = zero.initialize(model, adamw(model), zero.Config(timeout=20))
    if resume:
        engine.load_checkpoint(runs)
    while engine.steps < STEPS:
        engine.backward(language_loss(model, engine.steps, context.rank))
        engine.step()
        path = Path(runs, f"step-{engine.steps}")
        engine.save_checkpoint(
            path, {"steps": engine.steps}, keep_last=keep_last, async_=engine.steps % 3 > 0
        )
        if engine.steps % 3 == 0:
            Path(runs, f".saved-{context.rank}").write_text(str(engine.steps))
    engine.wait_for_checkpoint()
    return engine.steps


@pytest.fixture(scope="module")
def reference(cluster: Clusters, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Contents]:
    """What an undisturbed run saves, by step. The random states come and go with the process."""
    runs = tmp_path_factory.mktemp("reference")
    assert cluster(2).run(job_body, runs=str(runs), keep_last=None) == [STEPS, STEPS]
    return dict(_lasting(runs / name) for name in complete(runs, DISK))


def _lasting(path: Path) -> tuple[int, Contents]:
    steps, found = contents(path, DISK)
    return steps, {key: value for key, value in found.items() if not key.startswith("rank/")}


def killed_run(device: str, runs: Path, generator: random.Random) -> list[Any]:
    """Run the job and kill one rank after the other, some time after its first save has begun."""
    cluster = Cluster(device, 2)
    cluster.start()
    began = _under_way(runs)
    pids = [process.pid for process, _ in cluster._workers]

    def kill() -> None:
        while _under_way(runs) == began:
            time.sleep(0.0005)
        time.sleep(generator.uniform(0, 0.2))
        ranks = [0, 1]
        generator.shuffle(ranks)
        for rank in ranks:
            pid = pids[rank]
            assert pid is not None
            with contextlib.suppress(ProcessLookupError):  # it has ended after the other one
                os.kill(pid, signal.SIGKILL)
            time.sleep(generator.choice([0, ALONE]))

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        return cluster.outcomes(job_body, runs=str(runs), keep_last=2, limit=30)
    finally:
        killer.join()
        cluster.stop()


def _under_way(runs: Path) -> dict[str, int]:
    """Saves that have begun and have no name yet, and when their directories last changed."""
    found = {}
    for path in runs.glob(".*.zero-new"):
        with contextlib.suppress(FileNotFoundError):  # it has its name meanwhile
            found[path.name] = path.stat().st_mtime_ns
    return found


def test_kills(
    device: str, reference: dict[int, Contents], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    kills = request.config.getoption("--kills")
    generator = random.Random(kills)
    runs = tmp_path / "runs"
    runs.mkdir()
    killed = resumed = left_over = 0
    while killed < kills:
        outcomes = killed_run(device, runs, generator)
        assert all(o.status != "hung" for o in outcomes), outcomes
        # A survivor may notice at once; at the end of a run the kill may come too late.
        assert all(o.error.startswith("CommunicationError") for o in outcomes if o.status == "raised"), (
            outcomes
        )
        killed += any(o.status == "died" for o in outcomes)
        newest = _check(runs, reference)
        left_over += any(".zero-" in n for n in os.listdir(runs))
        resumed += 0 < newest < STEPS
        if newest > STEPS // 2:
            shutil.rmtree(runs)
            runs.mkdir()
    assert resumed
    assert left_over, "no kill came in the middle of a save"
    print(f"{killed} kills: {left_over} left something half-written, {resumed} left one to go on from")


def _check(runs: Path, reference: dict[int, Contents]) -> int:
    """All that is published is whole and right; `latest` is no older than the last save that returned."""
    for name in complete(runs, DISK):
        steps, found = _lasting(runs / name)
        assert name == f"step-{steps}"
        assert found == reference[steps]
    saved = [int(p.read_text() or 0) for p in runs.glob(".saved-*")]
    if not (runs / "latest").exists():
        assert not saved
        return 0
    steps, _ = _lasting(find(runs))
    assert steps >= max(saved, default=0)
    return steps
