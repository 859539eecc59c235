"""The kit, or a script, in a process forked from a server that has imported torch and pytest.

It is what `accelz check` or a fresh interpreter runs, without the seconds that importing both takes.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import textwrap
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accelz.conformance import TEST_SECONDS, cluster, runner

from .fake_distribution import environment

LIMIT_SECONDS = 280
SCRIPT_SECONDS = 60


def check(folder: Path, tests: str, name: str = "liar") -> tuple[int, dict[str, Any]]:
    """Exit code and summary of the kit's `tests` (as for -k) on a backend that is installed in `folder`."""
    report, notes, printed = folder / "report.jsonl", folder / "notes", folder / "printed"
    arguments = runner.arguments(name, tests, TEST_SECONDS, report, notes)
    variables = environment(folder, **runner.ISOLATED)
    code = _forked(_run, LIMIT_SECONDS, printed, printed, variables, arguments)
    assert code is not None, f"the kit hangs: {printed.read_text()}"
    ended = runner.Ended(code, printed.read_text(), silent=False)
    return code, runner.summary(name, report, notes, ended)


def _run(arguments: list[str]) -> int:
    return pytest.main(arguments)


def python(folder: Path, script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a process that has chosen no backend and sees the distributions in `folder`."""
    out, errors = folder / "stdout", folder / "stderr"
    code = _forked(
        _execute, SCRIPT_SECONDS, out, errors, environment(folder, **variables), textwrap.dedent(script)
    )
    assert code is not None, f"the script hangs: {errors.read_text()}"
    return subprocess.CompletedProcess(script, code, out.read_text(), errors.read_text())


def _execute(script: str) -> int:
    try:
        exec(compile(script, "<script>", "exec"), {"__name__": "__main__"})
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def _forked(
    call: Callable[[Any], int],
    seconds: float,
    out: Path,
    errors: Path,
    variables: dict[str, str],
    argument: Any,
) -> int | None:
    """Exit code of a process that ends with `call(argument)`; None where it was killed after `seconds`."""
    for path in (out, errors):
        path.unlink(missing_ok=True)
    cluster.prepare()
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=_child, args=(call, argument, variables, str(out), str(errors)))
    process.start()
    process.join(seconds)
    if process.exitcode is None:
        process.kill()
        process.join()
        return None
    return process.exitcode


def _child(
    call: Callable[[Any], int], argument: Any, variables: dict[str, str], out: str, errors: str
) -> None:
    os.environ.clear()
    os.environ.update(variables)
    sys.path[:0] = variables["PYTHONPATH"].split(os.pathsep)
    for stream, path in ((1, out), (2, errors)):
        with open(path, "a") as file:
            os.dup2(file.fileno(), stream)
    os.chdir(Path(out).parent)
    code = call(argument)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
