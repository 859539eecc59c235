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

import pytest

from tests.accelz.fake_distribution import environment
from tests.accelz.forked import started_ranks

TIMEOUT = 4.0
LIMIT = 60.0

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


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def end(processes: list[BaseProcess]) -> None:
    for process in processes:
        process.kill()
        process.join()


@pytest.mark.parametrize("saves", ["none", "sync", "async"])
def test_the_other_ranks_end_and_name_it(tmp_path: Path, device: str, saves: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    first, second = started_ranks(tmp_path, script, [str(tmp_path), saves], 2, ACCELZ_DEVICE=device)
    try:
        wait_until(lambda: all((tmp_path / f"at-{rank}").exists() for rank in range(2)))
        assert first.pid is not None
        os.kill(first.pid, signal.SIGSTOP)
        second.join(6 * TIMEOUT)
        said = (tmp_path / "stderr-1").read_text()
        assert second.exitcode == 1, said
        assert "zero.errors.CommunicationError" in said
        assert "the host of the job's store, 127.0.0.1:" in said
        assert "rank(s) none" not in said
    finally:
        end([first, second])


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
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", "script.py"],
        cwd=tmp_path,
        env=environment(tmp_path, OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    said = [line for line in done.stdout.splitlines() if line.startswith("True ")]
    assert len(said) == 2, done.stderr
    assert all("rank(s) 1 ended before they had joined the job" in line for line in said)
