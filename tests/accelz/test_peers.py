"""Whether other ranks' processes are known to have ended."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
from torch.distributed import HashStore

from accelz.ranks.machine import machine
from accelz.ranks.peers import Peers, card

KEYS = {0: "zero", 1: "one"}


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """Another process, which ends when its input does."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()


def of(child: subprocess.Popen[bytes], where: list[Any] | None = None) -> Peers:
    return Peers([card(), [where or machine(), child.pid]])


def test_a_process_that_lives_is_waited_for(child: subprocess.Popen[bytes]) -> None:
    assert of(child).ended(HashStore(), KEYS) == ""


def test_one_that_its_parent_has_not_noticed_has_ended(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie now
    assert of(child).ended(HashStore(), KEYS) == f"rank 1 (process {child.pid}) ended"


def test_one_that_is_gone_has_ended_unless_it_has_answered(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    store = HashStore()
    assert of(child).ended(store, KEYS) == f"rank 1 (process {child.pid}) ended"
    assert of(child).ended(store, {0: "zero"}) == "", "nobody waits for it"
    store.set("one", "")
    assert of(child).ended(store, KEYS) == ""


def test_nothing_is_said_of_other_machines(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    assert of(child, ["elsewhere"]).ended(HashStore(), KEYS) == ""
    assert Peers().ended(HashStore(), KEYS) == ""


def test_proc_of_other_processes_is_not_believed(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a namespace of its own that has the outer one's /proc."""
    monkeypatch.setattr(os, "readlink", lambda path: "1")
    monkeypatch.setattr(psutil, "Process", lambda pid: pytest.fail("asked of another process"))
    assert of(child, machine()).ended(HashStore(), KEYS) == ""
