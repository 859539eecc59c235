"""The command that is run where a device is, on the CPU and made small: every step runs and is reported."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

from scripts.device_check import tree
from scripts.device_check.steps import STEPS, Outcome, Plan, attempt

ROOT = Path(__file__).resolve().parents[2]


def device_check(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "scripts.device_check", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)


def test_every_step_runs_and_is_written_down(tmp_path: Path) -> None:
    done = device_check("cpu", "--quick", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, Any] = json.loads((tmp_path / "device-check.json").read_text())
    steps = {step["name"]: step for step in result["steps"]}
    assert set(steps) == set(STEPS)
    assert all(step["ok"] for step in steps.values())
    assert steps["engine"]["detail"]["counts"]["passed"] > 10
    assert {"adamw", "quantise", "copy"} <= {row["kernel"] for row in steps["bandwidth"]["detail"]}
    assert {"plain", "zero3"} <= {row["peer"] for row in steps["step"]["detail"]["rows"]}
    assert {"fsdp2-host", "zero3-host"} <= {row["peer"] for row in steps["offload"]["detail"]["rows"]}
    assert result["versions"]["torch"]
    table = (tmp_path / "device-check.md").read_text()
    assert all(f"| {name} | ok |" in table for name in STEPS)


def test_a_device_that_is_not_there_fails(tmp_path: Path) -> None:
    done = device_check("nosuch", "--steps", "info,conformance", "--out", str(tmp_path))
    assert done.returncode == 1
    assert done.stdout.count("FAILED") == 2
    assert "nosuch" in (tmp_path / "info.log").read_text()


def test_a_step_that_hangs_has_failed(tmp_path: Path, monkeypatch: Any) -> None:
    def hangs(plan: Plan) -> Outcome:
        plan.run("hangs", 0.2, "-c", "import time; time.sleep(60)")
        raise AssertionError

    monkeypatch.setitem(STEPS, "hangs", hangs)
    outcome = attempt("hangs", Plan("cpu", tmp_path, {}, quick=True, ranks=1))
    assert (outcome.ok, outcome.summary) == (False, "stopped after 0 s")


def test_the_tree_is_importable_without_an_installation(tmp_path: Path) -> None:
    """An interpreter that has none of our packages finds them, and what a wheel brings."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "carried-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("carried.py", "VALUE = 7\n")
    environment = tree.assemble(tmp_path / "site", wheels)
    script = (
        "import carried, importlib.metadata as m\n"
        "print(carried.VALUE, sorted(e.name for e in m.entry_points(group='accelz.backends')))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("7 ['cpu'")
