"""Ranks that torchrun has restarted meet each other, and not those that it has ended."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.distributed import DistStoreError, HashStore

from accelz.attempts import may_restart, meet


def attempt(store: HashStore, size: int, ranks: Sequence[int]) -> set[str]:
    """What the ranks that are there get."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return set(pool.map(lambda rank: meet(store, rank, size, 10.0), ranks))


def test_every_attempt_has_a_word_of_its_own_whatever_was_left_behind() -> None:
    store = HashStore()
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
    store = HashStore()
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(meet, store, 2, 4, 10.0)
        with pytest.raises(DistStoreError, match=r"after 0\.5 s waiting for rank\(s\) 1, 3 of this attempt"):
            meet(store, 0, 4, 0.5)
        assert other.result()


@pytest.mark.parametrize("agent", ["True", "False", ""])
def test_only_torchrun_restarts(monkeypatch: pytest.MonkeyPatch, agent: str) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", agent)
    assert may_restart() == (agent == "True")


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
