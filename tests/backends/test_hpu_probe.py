"""accelz-hpu's probe: one precise reason for each "no", read from files alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from accelz import Probe
from accelz_hpu import probe
from accelz_hpu.backend import accelz_backend


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with the bridge for the installed torch, and no device."""
    bridge = tmp_path / "site/habana_frameworks/torch"
    bridge.mkdir(parents=True)
    (bridge / "__init__.py").write_text("raise AssertionError('the probe must not import this')")
    (bridge / "required_version.txt").write_text("2.13.0\n")
    torch = tmp_path / "site/torch"
    torch.mkdir()
    (torch / "version.py").write_text("__version__ = '2.13.0+cpu'\n")
    specs = {
        "torch": type("Spec", (), {"origin": str(torch / "__init__.py")}),
        "habana_frameworks": type("Spec", (), {"submodule_search_locations": [str(bridge.parent)]}),
    }
    monkeypatch.setattr(probe, "find_spec", specs.get)
    monkeypatch.setattr(probe, "ROOT", tmp_path)
    return tmp_path


def add_device(
    root: Path, name: str, vendor: str = "0x1da3", kind: str = "0x1020", node: bool = True
) -> None:
    folder = root / f"sys/class/accel/{name}/device"
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(f"{vendor}\n")
    (folder / "device").write_text(f"{kind}\n")
    if node:
        add_node(root, name)


def add_node(root: Path, name: str) -> None:
    (root / "dev/accel").mkdir(parents=True, exist_ok=True)
    (root / "dev/accel" / name).touch()


def reason() -> str:
    answer = accelz_backend().probe()
    assert not answer.available
    return answer.reason


def test_devices_are_counted(server: Path) -> None:
    add_device(server, "accel0")
    assert accelz_backend().probe() == Probe(True, "1 Gaudi device")
    add_device(server, "accel1")
    assert accelz_backend().probe() == Probe(True, "2 Gaudi devices")


def test_no_bridge(server: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_device(server, "accel0")
    monkeypatch.setattr(probe, "find_spec", lambda name: None)
    assert reason().startswith("habana_frameworks is not installed: pip install 'accelz-hpu[habana]'")


def test_a_folder_left_behind_is_no_bridge(server: Path) -> None:
    add_device(server, "accel0")
    (server / "site/habana_frameworks/torch/__init__.py").unlink()
    assert reason().startswith("habana_frameworks is not installed")


def test_a_bridge_for_another_torch(server: Path) -> None:
    add_device(server, "accel0")
    (server / "site/habana_frameworks/torch/required_version.txt").write_text("2.9.0")
    assert reason() == (
        "habana_frameworks is built for torch 2.9.0 and torch is 2.13.0+cpu: install the two that match"
    )


def test_another_vendors_accelerator_is_not_taken(server: Path) -> None:
    add_device(server, "accel0", vendor="0x8086")
    assert reason() == "no Gaudi: no device in /sys/class/accel has vendor 0x1da3"


def test_no_node_in_the_container(server: Path) -> None:
    add_device(server, "accel3", node=False)
    assert reason().startswith("accel3 is in the machine but /dev/accel/accel3 is not here: start")


def test_nodes_alone_where_the_class_is_hidden(server: Path) -> None:
    assert reason().startswith("no Gaudi")
    for name in ("accel0", "accel_controlD0"):
        add_node(server, name)
    assert accelz_backend().probe() == Probe(True, "1 Gaudi device")


@pytest.mark.parametrize(("kind", "first"), [("0x1000", True), ("0x1010", True), ("0x1020", False)])
def test_the_first_generation_is_told_by_its_identifier(server: Path, kind: str, first: bool) -> None:
    add_device(server, "accel0", kind=kind)
    assert probe.is_first_generation() is first


def test_accelz_check_runs_here_and_says_why_not() -> None:
    """The one command for an owner of the hardware, on this machine, which has none."""
    command = [sys.executable, "-m", "accelz.cli", "check", "hpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if accelz_backend().probe().available:
        pytest.skip("there is a Gaudi here: run accelz check hpu")
    assert done.returncode == 2
    assert f"'hpu' cannot be tested here: {accelz_backend().probe().reason}" in done.stderr
