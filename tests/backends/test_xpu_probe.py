"""accelz-xpu's probe: one precise reason for each "no", read from files alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from accelz import Probe
from accelz_xpu import probe
from accelz_xpu.backend import accelz_backend

VERSION = """
from typing import Optional
__version__ = "2.13.0+xpu"
xpu: Optional[str] = {xpu!r}
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A torch that is built for XPU, whose import would fail, and no device."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise AssertionError('the probe must not import this')")
    (tmp_path / "torch/version.py").write_text(VERSION.format(xpu="20250301"))
    spec = type("Spec", (), {"origin": str(tmp_path / "torch/__init__.py")})
    monkeypatch.setattr(probe, "find_spec", {"torch": spec}.get)
    monkeypatch.setattr(probe, "ROOT", tmp_path)
    for name in probe.SELECTORS:
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def add_gpu(root: Path, node: str, vendor: str = "0x8086") -> None:
    folder = root / f"sys/class/drm/{node}/device"
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(f"{vendor}\n")
    (root / "dev/dri").mkdir(parents=True, exist_ok=True)
    (root / "dev/dri" / node).touch()


def reason() -> str:
    answer = accelz_backend().probe()
    assert not answer.available
    return answer.reason


def test_intel_gpus_are_named(machine: Path) -> None:
    add_gpu(machine, "renderD128", vendor="0x10de")
    add_gpu(machine, "renderD129")
    add_gpu(machine, "renderD130")
    answer = accelz_backend().probe()
    assert answer == Probe(True, "renderD129, renderD130, torch 2.13.0+xpu")


def test_no_gpu(machine: Path) -> None:
    add_gpu(machine, "renderD128", vendor="0x10de")
    assert reason() == "no Intel GPU: no render node in /sys/class/drm has vendor 0x8086"


def test_a_torch_without_xpu(machine: Path) -> None:
    add_gpu(machine, "renderD128")
    (machine / "torch/version.py").write_text(VERSION.format(xpu=None))
    assert reason() == "torch 2.13.0+xpu is built without XPU; install torch's build for Intel GPUs"


def test_no_torch(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "find_spec", lambda name: None)
    assert reason().startswith("torch is not installed")


def test_no_permission(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_gpu(machine, "renderD128")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert reason().startswith("no access to /dev/dri/renderD128: add the user to its group")


def test_what_chooses_devices_is_shown(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_gpu(machine, "renderD128")
    monkeypatch.setenv("ZE_AFFINITY_MASK", "1")
    assert accelz_backend().probe().reason.endswith("torch 2.13.0+xpu, ZE_AFFINITY_MASK=1")


def test_an_empty_mask_hides_nothing(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver takes an empty ZE_AFFINITY_MASK as unset."""
    add_gpu(machine, "renderD128")
    monkeypatch.setenv("ZE_AFFINITY_MASK", "")
    assert accelz_backend().probe() == Probe(True, "renderD128, torch 2.13.0+xpu")


def test_accelz_check_runs_here_and_says_why_not() -> None:
    """The one command for an owner of the hardware, on this machine, which has none."""
    if accelz_backend().probe().available:
        pytest.skip("there is an Intel GPU here: run accelz check xpu")
    command = [sys.executable, "-m", "accelz.cli", "check", "xpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert f"'xpu' cannot be tested here: {accelz_backend().probe().reason}" in done.stderr
