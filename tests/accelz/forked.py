"""The kit in a process forked from a server that has imported torch and pytest.

It is what `accelz check` runs, without the seconds that importing both takes for each of many doubles.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from accelz.conformance import TEST_SECONDS, cluster, runner

from .fake_distribution import environment

LIMIT_SECONDS = 280


def check(folder: Path, tests: str, name: str = "liar") -> tuple[int, dict[str, Any]]:
    """Exit code and summary of the kit's `tests` (as for -k) on a backend that is installed in `folder`."""
    report, notes, printed = folder / "report.jsonl", folder / "notes", folder / "printed"
    arguments = runner.arguments(name, tests, TEST_SECONDS, report, notes)
    variables = environment(folder, **runner.ISOLATED)
    cluster.prepare()
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=_run, args=(arguments, variables, str(printed)))
    process.start()
    process.join(LIMIT_SECONDS)
    assert process.exitcode is not None, f"the kit hangs: {printed.read_text()}"
    ended = runner.Ended(process.exitcode, printed.read_text(), silent=False)
    return process.exitcode, runner.summary(name, report, notes, ended)


def _run(arguments: list[str], variables: dict[str, str], printed: str) -> None:
    os.environ.clear()
    os.environ.update(variables)
    sys.path[:0] = variables["PYTHONPATH"].split(os.pathsep)
    with open(printed, "w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.chdir(Path(printed).parent)
    os._exit(pytest.main(arguments))
