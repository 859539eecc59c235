"""What is to be run, and how: each step is a process in a session of its own, with a time limit."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

LOG = "device-check.log"
SHARED_DEVICE = "ACCELZ_CUDA_SHARED_DEVICE"
"""The variable with which ranks may share a GPU: "1" where there are fewer GPUs than ranks."""


@dataclass(frozen=True)
class Plan:
    """What is to be run.

    out: the folder for results. scratch: a folder for temporary files. quick: run a small part of everything,
    to see that it works. ranks: how many may share the device. tests, only: which of the engine's tests, as
    pytest's paths and `-k`. workers: how many processes run the engine's tests side by side. within: seconds
    after which no comparison begins a further round. deadline: of the whole run, by time.monotonic().
    devices: how many there are.
    """

    device: str
    out: Path
    scratch: Path
    environment: dict[str, str]
    quick: bool = False
    ranks: int = 2
    tests: tuple[str, ...] = ()
    only: str = ""
    workers: int = 1
    within: float = 180.0
    deadline: float = math.inf
    devices: int = 1

    def run(
        self, name: str, limit: float, *arguments: str, under: tuple[str, ...] = ()
    ) -> subprocess.CompletedProcess[str]:
        """Run `python ARGUMENTS`. All its output goes to the log, and stdout is returned too.

        under: a command that runs it, such as a sanitizer's.

        After `limit` seconds, or at the deadline, the process and everything that it started is killed, and
        TimeoutExpired is raised.
        """
        limit = max(0.0, min(limit, self.deadline - time.monotonic()))
        command = [*under, sys.executable, *arguments]
        output = self.scratch / f"{name}.out"
        with (self.out / LOG).open("a", encoding="utf-8") as log, output.open("w", encoding="utf-8") as out:
            print(f"\n==== {name}: python {' '.join(arguments)}", file=log, flush=True)
            try:
                code = _finish(subprocess.Popen(
                    command, env=self.environment, stdout=out, stderr=log, start_new_session=True
                ), limit)  # fmt: skip
            finally:
                log.write(output.read_text(encoding="utf-8", errors="replace"))
        return subprocess.CompletedProcess(
            command, code, output.read_text(encoding="utf-8", errors="replace")
        )


def _finish(process: subprocess.Popen[bytes], limit: float) -> int:
    """Wait for a process, and kill what is left of its session, whatever happens."""
    try:
        return process.wait(limit)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
