"""Ranks that torchrun has restarted meet each other, and not those that it has ended."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.distributed import DistStoreError, HashStore

from accelz.ranks.attempts import may_restart, meet
from accelz.ranks.bounded_store import BoundedStore, bounded


def attempt(store: BoundedStore, size: int, ranks: Sequence[int]) -> set[str]:
    """What the ranks that are there get."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return set(pool.map(lambda rank: meet(store, rank, size, 10.0), ranks))


def test_every_attempt_has_a_word_of_its_own_whatever_was_left_behind() -> None:
    store = bounded(HashStore(), 10.0)
    words: set[str] = set()
    for size in (3, 2, 4, 1):
        found = attempt(store, size, range(size))
        assert len(found) == 1
        assert not found & words
        words |= found
        for rank in range(1, 4):
            with pytest.raises(DistStoreError):  # ended while it waited; its greeting stays
                meet(store, rank, 4, 0.01)


def test_who_is_not_there_is_named() -> None:
    store = bounded(HashStore(), 10.0)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(meet, store, 2, 4, 10.0)
        missing = r"^rank\(s\) 1, 3 did not come within 0\.5 s$"
        with pytest.raises(DistStoreError, match=missing):
            meet(store, 0, 4, 0.5)
        with pytest.raises(DistStoreError, match=missing):
            other.result()


def test_who_waits_shorter_than_rank_0_names_the_missing_too() -> None:
    store = bounded(HashStore(), 10.0)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(meet, store, 0, 3, 10.0)
        missing = r"^rank\(s\) 2 did not come within 0\.5 s$"
        with pytest.raises(DistStoreError, match=missing):
            meet(store, 1, 3, 0.5)
        with pytest.raises(DistStoreError, match=missing):
            first.result()


@pytest.mark.parametrize("knowing", [0, 1])
def test_that_a_rank_has_ended_is_told_by_the_one_that_knows(knowing: int) -> None:
    """It may be on another machine than rank 0."""
    store, told = bounded(HashStore(), 10.0), "rank 2 has ended"
    began = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        waits = [pool.submit(meet, store, r, 3, 10.0, lambda r=r: told * (r == knowing)) for r in range(2)]
        for wait in waits:
            with pytest.raises(DistStoreError, match=told):
                wait.result()
    assert time.monotonic() - began < 5


def test_that_rank_0_has_ended_is_told() -> None:
    with pytest.raises(DistStoreError, match=r"^rank 0 has ended$"):
        meet(bounded(HashStore(), 10.0), 1, 2, 10.0, lambda: "rank 0 has ended")


@pytest.mark.parametrize("agent", ["True", "False", ""])
def test_only_torchrun_restarts(monkeypatch: pytest.MonkeyPatch, agent: str) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", agent)
    assert may_restart() == (agent == "True")


@pytest.mark.slow
def test_a_job_goes_on_after_a_restart(tmp_path: Path) -> None:
    """With torchrun, as users start it: a rank is killed, and all are started again."""
    script = """
        import os, signal, torch, zero
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.AdamW(model.parameters())
        engine = zero.initialize(model, optimizer, zero.Config(timeout=30))
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        for step in range(3):
            engine.backward(engine(torch.ones(2, 8)).square().mean())
            engine.step()
            if attempt == 0 and engine.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        print(f"attempt {attempt} rank {engine.rank}\\n", end="", flush=True)
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(script))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "1"]
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", "--monitor-interval", "0.1", "script.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["attempt 1 rank 0", "attempt 1 rank 1"]
