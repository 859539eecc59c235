"""Ranks whose launcher, or whose store, is gone do not train on alone."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
from torch import nn
from torch.distributed import HashStore, TCPStore

import zero
from accelz import Group
from accelz.conformance.cluster import Clusters, Context, prepare
from accelz.ranks.bounded_store import bounded, open_store
from accelz.ranks.launcher import Launcher
from tests.accelz.fake_distribution import environment
from tests.zero.helpers.models import features
from tests.zero.helpers.training import adamw
from tests.zero.helpers.waiting import wait_until
from zero.communication.launch import Launch

pytestmark = [pytest.mark.slow, pytest.mark.host]  # starts programs


def orphaned_body(context: Context, outlive: bool) -> tuple[int, str]:
    """Rank 1 finds that its launcher has ended."""
    model = nn.Linear(4, 4)
    engine = zero.initialize(model, adamw(model), zero.Config(outlive_launcher=outlive))
    launch = engine._communicator._launch
    try:
        for step in range(3):
            if step == 1 and context.rank == 1 and launch:
                launch.gone = "torchrun"
            engine.backward(engine(features(step, context.rank, model, width=4)).square().mean())
            engine.step()
    except zero.CommunicationError as error:
        return engine.steps, str(error)
    finally:
        if launch:
            launch.gone = ""  # later engines of these ranks share it
    return engine.steps, ""


def test_all_ranks_end_in_one_step_with_an_error(cluster: Clusters) -> None:
    (first, there), (second, here) = cluster(2).run(orphaned_body, outlive=False)
    assert first == second == 1
    assert here.startswith("rank 1 ends, as torchrun has ended")
    assert there.startswith("rank 0 ends, as a process that another rank depends on has ended")
    assert "Config(outlive_launcher=True)" in here


def test_a_rank_alone_ends_too(cluster: Clusters) -> None:
    (steps, said), *_ = cluster(1).run(alone_body)
    assert (steps, said[:16]) == (1, "rank 0 ends, as ")


def alone_body(context: Context) -> tuple[int, str]:
    model = nn.Linear(4, 4)
    engine = zero.initialize(model, adamw(model))
    try:
        for step in range(3):
            engine.backward(engine(features(step, 0, model, width=4)).square().mean())
            engine.step()
            engine._communicator._launch.gone = "torchrun"
    except zero.CommunicationError as error:
        return engine.steps, str(error)
    finally:
        engine._communicator._launch.gone = ""
    return engine.steps, ""


def test_by_setting_they_train_on(cluster: Clusters) -> None:
    assert cluster(2).run(orphaned_body, outlive=True) == [(3, "")] * 2


def _host(pipe: Connection) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()


@contextmanager
def hosted() -> Iterator[tuple[Any, Launch]]:
    prepare()
    context = multiprocessing.get_context("forkserver")
    here, there = context.Pipe()
    process = context.Process(target=_host, args=(there,), daemon=True)
    process.start()
    nothing: Any = None
    store = open_store("127.0.0.1", here.recv(), hosted_here=False, seconds=0.5)
    yield process, Launch(Group(1, 2, 0.5, store, nothing))
    process.kill()
    process.join()


def test_a_store_that_has_refused_twice_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zero.communication.launch.ASK_EVERY", 0.0)
    monkeypatch.setattr("zero.communication.launch.keep_looking", lambda at: None)
    with hosted() as (process, launch):
        launch.look()
        process.kill()
        process.join()
        launch.look()
        assert launch.gone == "", "once may be chance"
        launch.look()
        assert "the process that has the job's store (127.0.0.1:" in launch.gone


def test_a_store_whose_host_is_stopped_is_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may go on."""
    monkeypatch.setattr("zero.communication.launch.ASK_EVERY", 0.0)
    monkeypatch.setattr("zero.communication.launch.keep_looking", lambda at: None)
    with hosted() as (process, launch):
        os.kill(process.pid, signal.SIGSTOP)
        wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
        for _ in range(3):
            launch.look()
        assert launch.gone == ""


def test_a_launcher_that_has_ended_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        found = Launcher(psutil.Process(process.pid))
        monkeypatch.setattr(Launcher, "find", lambda: found)
        nothing: Any = None
        launch = Launch(Group(0, 1, 10.0, bounded(HashStore(), 10.0), nothing))
        launch.look()
        assert launch.gone == ""
        process.kill()
        process.wait()
        launch.look()
        assert launch.gone == f"torchrun's process on this machine ({process.pid})"


def test_ranks_end_when_torchrun_is_killed(tmp_path: Path) -> None:
    script = """
        import os, time, torch, zero
        from pathlib import Path
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.AdamW(model.parameters())
        engine = zero.initialize(model, optimizer, zero.Config(timeout=20))
        try:
            while True:
                engine.backward(engine(torch.ones(2, 8)).square().mean())
                engine.step()
                Path(f"process-{engine.rank}").write_text(str(os.getpid()))
                time.sleep(0.05)
        except zero.CommunicationError as error:
            Path(f"said-{engine.rank}").write_text(str(error))
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(script))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    process = subprocess.Popen(
        [*command, "script.py"], cwd=tmp_path, env=environment(tmp_path, OMP_NUM_THREADS="1")
    )

    def there(what: str) -> bool:
        return all((tmp_path / f"{what}-{rank}").exists() for rank in range(2))

    wait_until(lambda: there("process"))
    process.kill()
    process.wait()
    try:
        wait_until(lambda: there("said"))
        said = (tmp_path / "said-0").read_text()
        assert "has ended: nothing would end the ranks" in said
    finally:
        for rank in range(2):
            with_number = (tmp_path / f"process-{rank}").read_text()
            if with_number and psutil.pid_exists(int(with_number)):
                os.kill(int(with_number), signal.SIGKILL)
