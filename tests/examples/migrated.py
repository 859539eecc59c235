"""Runs of the scripts of examples/migration."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.accelz import forked

SCRIPTS = Path(__file__).resolve().parents[2] / "examples" / "migration"
STEPS = 24  # or micro-batches
CLOSE = 2e-5  # losses are near 1, in fp32, printed with six decimals


def losses(folder: Path, name: str) -> tuple[list[float], list[float]]:
    """The losses and the learning rates that a script prints, on two ranks."""
    folder.mkdir()
    script = SCRIPTS / f"{name}.py"
    if name == "deepspeed_before":  # which is not to be forked
        done = torchrun(script, str(folder))
    else:
        done = forked.job(folder, script, [str(folder)], ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    found, rates = (
        [float(number) for number in re.findall(rf"\b{kind} ([\d.]+)", done.stdout)]
        for kind in ("loss", "rate")
    )
    assert len(found) == STEPS
    assert found[-1] < 0.6 * found[0]
    return found, rates


def torchrun(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    variables = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    command = [*launch, str(script), *arguments]
    return subprocess.run(command, check=False, env=variables, capture_output=True, text=True, timeout=250)
