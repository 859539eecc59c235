"""Which process is torchrun's, and whether it has ended."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from accelz.ranks.launcher import Launcher

from .fake_distribution import environment

pytestmark = pytest.mark.slow  # starts programs

FIND = "from accelz.ranks.launcher import Launcher; print(getattr(Launcher.find(), 'process', None))"
RANK = {"RANK": "0", "TORCHELASTIC_RUN_ID": "some"}


def found(folder: Path, command: list[str], **variables: str) -> str:
    given = environment(folder, **variables)
    return subprocess.run(command, env=given, capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.mark.parametrize("through", [[], ["sh", "-c", '"$@"; exit', "sh"]])
def test_it_is_the_first_process_above_that_is_no_ranks(tmp_path: Path, through: list[str]) -> None:
    assert f"pid={os.getpid()}," in found(tmp_path, [*through, sys.executable, "-c", FIND], **RANK)


def test_others_launchers_are_not_looked_for(tmp_path: Path) -> None:
    """They may start ranks and go."""
    assert found(tmp_path, [sys.executable, "-c", FIND], RANK="0").strip() == "None"


@pytest.mark.parametrize("noticed", [False, True])
def test_it_has_ended_whether_or_not_its_parent_has_noticed(noticed: bool) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        launcher = Launcher(psutil.Process(process.pid))
        assert not launcher.has_ended()
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        if noticed:
            process.wait()
        assert launcher.has_ended()
        assert str(process.pid) in str(launcher)
