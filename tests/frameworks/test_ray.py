"""examples/launch/ray_train.py with the real Ray: two workers on CPUs, one of which is killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # Ray starts a dozen processes

DRIVER = Path(__file__).with_name("ray_job.py")
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "launch"


def test_a_killed_worker_is_replaced_and_training_goes_on(tmp_path: Path) -> None:
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(EXAMPLE),
        "RAY_AUTH_MODE": "disabled",  # it would write a token to the home directory
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    done = subprocess.run(
        [sys.executable, str(DRIVER), str(tmp_path)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"plain"')))
    assert "died" in found["there"]
    assert found["last"]["epoch"] == 3
    assert found["last"]["loss"] == pytest.approx(found["plain"][-1], abs=1e-6)
    assert found["checkpoint"] == "epoch-3"
    assert [name for name in found["there"] if name.startswith("epoch-")] == ["epoch-2", "epoch-3"]
