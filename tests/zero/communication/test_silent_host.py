"""The process that hosts the job's store is stopped, not gone: nobody waits for it without a limit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch.distributed import HashStore

import zero
from accelz import Group
from accelz.ranks.bounded_store import bounded
from accelz.ranks.peers import Peers
from tests.accelz.fake_distribution import environment
from tests.accelz.forked import started_ranks
from tests.zero.helpers.waiting import end, wait_until
from zero.checkpoint.save_messages import SaveMessages
from zero.communication.communicator import Communicator
from zero.communication.grid import Grid
from zero.communication.job import JobGroups
from zero.communication.line import Line
from zero.communication.reports import Failure, Reports
from zero.communication.waits import Waits

pytestmark = [pytest.mark.slow, pytest.mark.host]  # starts programs

TIMEOUT = 4.0

TRAIN = f"""
import sys
from pathlib import Path
import torch, zero

torch.manual_seed(0)
folder, saves = Path(sys.argv[1]), sys.argv[2]
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
optimizer = torch.optim.AdamW(model.parameters())
engine = zero.initialize(model, optimizer, zero.Config(timeout={TIMEOUT}))
while True:
    engine.backward(engine(torch.ones(2, 8, device=engine.accelerator.device)).square().mean())
    engine.step()
    (folder / f"at-{{engine.rank}}").touch()
    if saves != "none":
        engine.save_checkpoint(folder / f"step-{{engine.steps}}", keep_last=1, async_=saves == "async")
"""


def test_the_other_ranks_end_and_name_it(tmp_path: Path, device: str) -> None:
    """Jobs that save in every way, or not at all: they wait for their hosts together."""
    jobs: dict[str, list[BaseProcess]] = {}
    try:
        for saves in ("none", "sync", "async"):
            folder = tmp_path / saves
            folder.mkdir()
            (folder / "train.py").write_text(TRAIN)
            arguments = [str(folder), saves]
            jobs[saves] = started_ranks(folder, folder / "train.py", arguments, 2, ACCELZ_DEVICE=device)
        for saves, (first, _) in jobs.items():
            wait_until(lambda saves=saves: all((tmp_path / saves / f"at-{rank}").exists() for rank in (0, 1)))
            assert first.pid is not None
            os.kill(first.pid, signal.SIGSTOP)
        for saves, (_, second) in jobs.items():
            second.join(6 * TIMEOUT)
            said = (tmp_path / saves / "stderr-1").read_text()
            assert second.exitcode == 1, (saves, said)
            assert "zero.errors.CommunicationError" in said, saves
            assert "the host of the job's store, 127.0.0.1:" in said, saves
            assert "rank(s) none" not in said, saves
    finally:
        end([process for ranks in jobs.values() for process in ranks])


SILENCE = 20.0  # seconds, for which it keeps a thread


class Silent(HashStore):
    """A store whose host does not answer."""

    def add(self, key: str, amount: int) -> int:
        time.sleep(SILENCE)
        return super().add(key, amount)

    def clone(self) -> Silent:
        time.sleep(SILENCE)
        return self


def group_of(seconds: float) -> Group:
    nothing: Any = SimpleNamespace(group_name="some")
    return Group(1, 2, seconds, bounded(Silent(), seconds), nothing)


def save() -> None:
    SaveMessages(group_of(0.2), "save", Peers())


def engine() -> None:
    job: Any = SimpleNamespace(peers=Peers(), launch=None)
    whole = group_of(0.2)
    groups = JobGroups(job, Grid.plain(2), whole, whole, whole, ranks=(0, 1))
    groups.line = cast(Line, SimpleNamespace(engine=1))
    accelerator: Any = SimpleNamespace(collectives=None)
    Communicator(accelerator, groups, "Net")


@pytest.mark.parametrize("what", [save, engine])
def test_what_begins_while_the_host_is_silent_says_so(what: Callable[[], None]) -> None:
    with pytest.raises(zero.CommunicationError, match=r"store, Silent, has not answered for 0\.2 s"):
        what()


def test_a_failed_collective_is_explained_in_seconds() -> None:
    """However long the timeout: what explains it is no wait of its own."""
    group = group_of(600.0)
    reports, began = Reports(group, "engine"), time.monotonic()
    failure = Failure(1, "all_gather of unit 'a'", 601.0, "it broke")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zero.communication.reports.SECONDS", 0.2)
        said = reports.describe(failure, reports.exchange(failure), {})
        Waits(Reports(group, "watch")).places([0], 1)
    assert time.monotonic() - began < SILENCE / 2
    assert "it broke. Nothing is known of the other ranks: the host of the job's store, Silent" in said


def test_a_long_wait_is_logged_with_the_silence(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zero.communication.waits.keep_looking", lambda _: None)  # nobody looks beside it

    class Deaf(HashStore):
        def set(self, key: str, value: str) -> None:
            time.sleep(2)

    nothing: Any = None
    waits = Waits(Reports(Group(1, 2, 0.2, bounded(Deaf(), 0.2), nothing), "watch"))
    with waits.waiting(1, "all_gather of unit 'a'"):
        waits.patience = 0.0
        waits.look()
    assert "in collective 1, all_gather of unit 'a': the host of the job's store, Deaf" in caplog.text


def test_a_rank_that_ends_politely_before_it_joins_is_named_within_seconds(tmp_path: Path) -> None:
    """With torchrun, which ends the other ranks only when one fails."""
    script = """
        import os, sys, time
        if os.environ["RANK"] == "1":
            sys.exit(0)
        import torch, zero
        model, began = torch.nn.Linear(8, 8), time.monotonic()
        try:
            zero.initialize(model, torch.optim.AdamW(model.parameters()), zero.Config(timeout=100))
        except zero.CommunicationError as error:
            print(f"{time.monotonic() - began < 30} {error}")
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(script))
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "script.py"],
        cwd=tmp_path,
        env=environment(tmp_path, OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    said = [line for line in done.stdout.splitlines() if line.startswith("True ")]
    assert len(said) == 1, done.stderr
    assert "rank(s) 1 ended before they had joined the job" in said[0]
