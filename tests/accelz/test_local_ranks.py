"""Which ranks of a machine are known to have ended before they joined."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import pytest

from .fake_distribution import environment

LOOK = """
import sys, time
from accelz.ranks import local_ranks

def look(until=1.5):
    local_ranks.AT_ONCE, local_ranks.JOIN_SECONDS, local_ranks.LOOK_EVERY = 0.3, float(sys.argv[1]), 0.05
    ranks, end = local_ranks.LocalRanks(), time.monotonic() + until
    while time.monotonic() < end and not ranks.ended():
        time.sleep(0.02)
    print(ranks.ended(), flush=True)
"""
STARTED = LOOK + "look()"

FORKED = (
    LOOK
    + """
import os
for rank in range(2):
    if not os.fork():
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
        if rank == 0:
            look()
        elif sys.argv[2] == "lives":
            time.sleep(3)
        os._exit(0)
os.wait(), os.wait()
"""
)


def variables(rank: int, size: int = 2, local_size: int = 2) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % local_size),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(local_size),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
    }


def told(folder: Path, script: str, *arguments: str, beside: str = "", **given: str) -> str:
    """What the script prints. beside: a command whose process has the same parent, a shell's."""
    command = ["sh", "-c", f'{beside} "$@"; exit $?', "sh", sys.executable, "-c", script, *arguments]
    done = subprocess.run(
        command, env=environment(folder, **given), capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.strip()


@contextmanager
def living(folder: Path, **given: str) -> Iterator[None]:
    command = [sys.executable, "-c", "input()"]
    process = subprocess.Popen(command, env=environment(folder, **given), stdin=subprocess.PIPE)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def test_a_rank_of_torchruns_that_has_no_process_has_ended(tmp_path: Path) -> None:
    job = {"TORCHELASTIC_RUN_ID": uuid4().hex}
    with living(tmp_path, **variables(1), TORCHELASTIC_RUN_ID="another job"):
        said = told(tmp_path, STARTED, "60", **variables(0), **job)
    assert said.startswith("rank(s) 1 ended before they had joined the job: for 0.3 s")
    with living(tmp_path, **variables(1), **job):
        assert told(tmp_path, STARTED, "60", **variables(0), **job) == ""


def test_a_process_whose_environment_is_hidden_may_be_any_rank(tmp_path: Path) -> None:
    """Programs that set their process's title overwrite it."""
    given = variables(0) | {"TORCHELASTIC_RUN_ID": uuid4().hex}
    assert told(tmp_path, STARTED, "60", beside="env -i sleep 8 >/dev/null 2>&1 &", **given) == ""


def test_ranks_of_other_machines_are_not_looked_for(tmp_path: Path) -> None:
    job = {"TORCHELASTIC_RUN_ID": uuid4().hex}
    with living(tmp_path, **variables(3, size=4), **job):
        assert told(tmp_path, STARTED, "60", **variables(2, size=4), **job) == ""


@pytest.mark.parametrize(("seconds", "named"), [("60", False), ("0.3", True)])
def test_other_launchers_may_take_longer(tmp_path: Path, seconds: str, named: bool) -> None:
    given = variables(0) | {"MASTER_PORT": uuid4().hex}
    assert ("rank(s) 1 ended" in told(tmp_path, STARTED, seconds, **given)) == named
    with living(tmp_path, **given | {"RANK": "1"}):
        assert told(tmp_path, STARTED, seconds, **given) == ""


def test_who_does_not_know_which_ranks_are_here_names_nobody(tmp_path: Path) -> None:
    """Launchers may deal ranks out to machines in turn, and need not say how many are on each."""
    assert told(tmp_path, STARTED, "0.3", **variables(0, size=4)) == ""
    given = variables(0) | {"LOCAL_WORLD_SIZE": ""}
    assert told(tmp_path, STARTED, "0.3", **given) == ""


@pytest.mark.parametrize(("other", "said"), [("lives", False), ("ends", True)])
def test_ranks_that_were_forked_are_their_parents_children(tmp_path: Path, other: str, said: bool) -> None:
    """Their environment does not show their rank."""
    assert ("rank(s) 1 ended" in told(tmp_path, FORKED, "0.3", other)) == said
