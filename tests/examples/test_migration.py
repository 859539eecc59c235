"""The scripts of examples/migration: the same losses before and after."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.accelz import forked

pytestmark = pytest.mark.slow  # starts programs

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


def test_fsdp2_and_zero_have_the_same_losses_and_weights(tmp_path: Path) -> None:
    before, _ = losses(tmp_path / "before", "fsdp2_before")
    after, _ = losses(tmp_path / "after", "fsdp2_after")
    assert after == pytest.approx(before, abs=CLOSE)
    old, new = (torch.load(tmp_path / name / "weights.pt") for name in ("before", "after"))
    assert new.keys() == old.keys()
    for name, value in old.items():
        torch.testing.assert_close(new[name], value, atol=1e-4, rtol=1e-4)


def test_deepspeeds_script_trains_and_saves(tmp_path: Path) -> None:
    _, rates = losses(tmp_path / "after", "deepspeed_after")
    assert rates[:8] == [0, 0, 0, 0.005, 0.005, 0.007925, 0.007925, 0.01]  # every other one after a step
    assert (tmp_path / "after" / "epoch-2").is_dir()


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_deepspeed_and_zero_have_the_same_losses_and_rates(tmp_path: Path) -> None:
    before, old_rates = losses(tmp_path / "before", "deepspeed_before")
    after, new_rates = losses(tmp_path / "after", "deepspeed_after")
    assert after == pytest.approx(before, abs=CLOSE)
    assert new_rates == old_rates
