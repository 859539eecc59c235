"""A program that uses zero.integrations is started as any other: by `accelerate launch`.

It is torchrun with variables of its own. Those that torchrun sets are what test_examples.py runs with.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from accelz.conformance.cluster import Clusters
from tests.accelz.forked import held_port
from tests.frameworks import accelerate_loops as loops
from tests.frameworks import trainer_runs
from tests.frameworks.jobs import assert_same_log

NOTEBOOK = Path(__file__).with_name("notebook.py")
PROGRAM = Path(__file__).with_name("launched.py")
LAUNCHER = ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0"]


def test_a_launched_program_trains(cluster: Clusters, tmp_path: Path) -> None:
    out = tmp_path / "log.json"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *LAUNCHER, str(PROGRAM), str(out), str(tmp_path)]
    subprocess.run(command, env=environment, cwd=tmp_path, check=True, timeout=240)
    found = json.loads(out.read_text())
    wanted = cluster(2).run(loops.trained, stage=3, clip_norm=0.5, epochs=2)[0]["log"]
    for key, values in found["loop"].items():
        assert values == pytest.approx(wanted[key], rel=1e-6), key
    logged = cluster(2).run(trainer_runs.trained, stage=3, directory=str(tmp_path))[0]["log"]
    assert_same_log(found["trainer"], logged[: len(found["trainer"])], 1e-6)


def test_a_notebook_launches_ranks_until_its_kernel_is_one(tmp_path: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with held_port() as held:
        command = [sys.executable, str(NOTEBOOK), str(held.getsockname()[1])]
        done = subprocess.run(
            command, env=environment, cwd=tmp_path, check=False, timeout=240, capture_output=True, text=True
        )
    printed = [line for line in done.stdout.splitlines() if line.startswith("rank")]
    assert sorted(printed) == ["rank 0 of 1 holds 1056", "rank 0 of 2 holds 528", "rank 1 of 2 holds 528"]
    assert done.returncode == 1
    assert "forked by one that has joined a job" in done.stderr
