"""The Makefile's targets that need more of a machine than Python."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.host


def test_without_a_browser_and_a_way_to_install_one_the_target_says_so_and_goes_on(tmp_path: Path) -> None:
    apt = tmp_path / "apt-get"
    apt.write_text("#!/bin/sh\necho are you root? >&2\nexit 100\n")
    apt.chmod(0o755)
    rest = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    made = subprocess.run(
        ["make", "--no-print-directory", "browser", "BROWSERS=none-a none-b"],
        cwd=ROOT,
        check=False,
        env={**rest, "PATH": f"{tmp_path}:{rest['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0
    assert made.stdout.splitlines() == [
        "no browser of none-a none-b is here, and apt-get cannot install one: reports are not looked at"
    ]
    assert made.stderr == ""
