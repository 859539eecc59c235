"""Which ranks of this machine have ended before they have said anything to the others.

Their launcher knows, but tells nobody. So it is read from the processes of this machine: those that a
launcher starts have their rank in the environment they begin with.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

import psutil  # type: ignore[import-untyped]

AT_ONCE = 5.0
"""Seconds without a process after which a rank of torchrun's has ended: a machine's are started at once."""

JOIN_SECONDS = 60.0
"""The same for other launchers' ranks, which may be started one by one."""

LOOK_EVERY = 1.0
"""Seconds between two looks at the processes."""

_JOB = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")


class LocalRanks:
    """The ranks of this process's machine, as far as the environment tells which they are."""

    def __init__(self) -> None:
        self._began = _environment(psutil.Process())  # as the launcher has made it
        self._ranks = _ranks_here()
        self._by_torchrun = "TORCHELASTIC_RUN_ID" in self._began
        self._limit = AT_ONCE if self._by_torchrun else JOIN_SECONDS
        self._absent_since: dict[int, float] = {}
        self._looked = float("-inf")

    def ended(self) -> str:
        """Say which ranks have had no process for long enough; "" if there are none."""
        now = time.monotonic()
        if now - self._looked >= LOOK_EVERY and self._ranks:
            self._looked = now
            self._absent_since = {rank: self._absent_since.get(rank, now) for rank in self._absent()}
        gone = [rank for rank, since in self._absent_since.items() if now - since >= self._limit]
        if not gone:
            return ""
        ranks = ", ".join(map(str, gone))
        return (
            f"rank(s) {ranks} ended before they had joined the job: for {self._limit:g} s there has been no "
            "process of theirs on this machine. Look at their output first"
        )

    def _absent(self) -> list[int]:
        """The ranks of which no process is to be seen; none where processes do not show their rank."""
        if "RANK" not in self._began:
            alone = len(_children(os.getppid())) == 1
            return [rank for rank in self._ranks if alone and str(rank) != os.environ["RANK"]]
        if any("RANK" not in _environment(child) for child in _children(os.getppid())):
            return []  # it may be any of them: what sets a process's title overwrites its environment
        there = {
            environment.get("RANK")
            for environment in map(_environment, psutil.process_iter())
            if all(environment.get(name) == self._began.get(name) for name in _JOB)
        }
        return [rank for rank in self._ranks if str(rank) not in there]


def _ranks_here() -> range:
    """The ranks of this machine: all of the job, or those that torchrun counts. Empty if it is not known."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    values = [os.environ.get(name, "") for name in names]
    if not all(value.isdecimal() for value in values) or not _sees_its_own_processes():
        return range(0)
    rank, size, local_rank, local_size = map(int, values)
    if size != local_size and "TORCHELASTIC_RUN_ID" not in os.environ:
        return range(0)  # other launchers may deal ranks out to machines in turn
    return range(rank - local_rank, rank - local_rank + local_size)


def _sees_its_own_processes() -> bool:
    """Whether /proc is there, and not that of another namespace."""
    try:
        return os.readlink("/proc/self") == str(os.getpid())
    except OSError:
        return False


def _environment(process: psutil.Process) -> Mapping[str, str]:
    """The environment that a process began with; empty if it has ended or is another user's."""
    try:
        return {} if process.status() == psutil.STATUS_ZOMBIE else process.environ()
    except (psutil.Error, OSError):
        return {}


def _children(process: int) -> list[psutil.Process]:
    """The children of a process that have not ended."""
    try:
        children = psutil.Process(process).children()
        return [child for child in children if child.status() != psutil.STATUS_ZOMBIE]
    except psutil.Error:
        return []
