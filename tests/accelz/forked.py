"""The kit, or a script, in processes forked from a server that has imported torch and pytest.

It is what `accelz check`, a fresh interpreter or torchrun runs, without the seconds that the imports take.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

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


def job(
    folder: Path, script: Path, arguments: Sequence[str], ranks: int, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a script on ranks of one thread each; when a rank fails, the others end with it. The result has the
    first exit code that is not 0, and what all ranks printed."""
    running = started_ranks(folder, script, arguments, ranks, **variables)
    code = _ended_together(running, time.monotonic() + LIMIT_SECONDS)
    printed, errors_printed = (
        "".join(path.read_text() for path in paths)
        for paths in zip(*(_outputs(folder, rank) for rank in range(ranks)), strict=True)
    )
    assert code is not None, f"the job hangs: {errors_printed}"
    return subprocess.CompletedProcess([str(script), *arguments], code, printed, errors_printed)


def started_ranks(
    folder: Path, script: Path, arguments: Sequence[str], ranks: int, **variables: str
) -> list[BaseProcess]:
    """Start a script on ranks of one thread each, with the variables that torchrun sets. What a rank prints
    goes to `folder`, into stdout-RANK and stderr-RANK."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    running = []
    for rank in range(ranks):
        out, errors = _outputs(folder, rank)
        own = place | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
        given = environment(folder, OMP_NUM_THREADS="1", **own, **variables)
        running.append(_started(_run_script, out, errors, given, (str(script), *arguments)))
    return running


def _outputs(folder: Path, rank: int) -> tuple[Path, Path]:
    return folder / f"stdout-{rank}", folder / f"stderr-{rank}"


def _ended_together(running: Sequence[BaseProcess], deadline: float) -> int | None:
    """The job's exit code; None where it was killed at the deadline."""
    codes: list[int | None] = [None]
    while None in codes and not any(codes) and time.monotonic() < deadline:
        time.sleep(0.02)
        codes = [process.exitcode for process in running]
    for process in running:
        if process.exitcode is None:
            process.kill()
        process.join()
    return next(filter(None, codes), None if None in codes else 0)


def _run_script(command: Sequence[str]) -> int:
    torch.set_num_threads(1)
    sys.argv = list(command)
    sys.path.insert(0, str(Path(command[0]).parent))
    try:
        runpy.run_path(command[0], run_name="__main__")
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except Exception:
        traceback.print_exc()
        return 1
    return 0


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
    process = _started(call, out, errors, variables, argument)
    process.join(seconds)
    if process.exitcode is None:
        process.kill()
        process.join()
        return None
    return process.exitcode


def _started(
    call: Callable[[Any], int], out: Path, errors: Path, variables: dict[str, str], argument: Any
) -> BaseProcess:
    for path in (out, errors):
        path.unlink(missing_ok=True)
    cluster.prepare()
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=_child, args=(call, argument, variables, str(out), str(errors)))
    process.start()
    return process


def _child(
    call: Callable[[Any], int], argument: Any, variables: dict[str, str], out: str, errors: str
) -> None:
    os.environ.clear()
    os.environ.update(variables)
    tempfile.tempdir = None  # as the server's environment had it
    sys.path[:0] = variables["PYTHONPATH"].split(os.pathsep)
    for stream, path in ((1, out), (2, errors)):
        with open(path, "a") as file:
            os.dup2(file.fileno(), stream)
    os.chdir(Path(out).parent)
    code = call(argument)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
