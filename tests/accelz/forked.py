"""The kit, or a program, in processes forked from a server that has imported torch and pytest.

It is what `accelz check`, a fresh interpreter or torchrun runs, without the seconds that the imports take.
Ranks that such a process starts come from the same server.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from accelz import cli
from accelz.conformance import TEST_SECONDS, cluster, runner

from .fake_distribution import environment

LIMIT_SECONDS = 280
SCRIPT_SECONDS = 60
STACKS_SECONDS = 0.5
"""What a process is given to print where its threads are, before it is killed at its limit."""


def check(
    folder: Path, tests: str | None, name: str = "liar", quick: bool = False, **variables: str
) -> tuple[int, dict[str, Any]]:
    """Exit code and summary of the kit's `tests` (as for -k) on a backend that is installed in `folder`."""
    report, notes, printed = folder / "report.jsonl", folder / "notes", folder / "printed"
    for path in (report, notes):
        path.unlink(missing_ok=True)
    arguments = runner.arguments(name, tests, TEST_SECONDS, report, notes, quick)
    given = environment(folder, **runner.ISOLATED, **variables)
    code = _forked(_run, LIMIT_SECONDS, printed, printed, given, arguments)
    assert code is not None, f"the kit hangs: {printed.read_text()}"
    ended = runner.Ended(code, printed.read_text(), silent=False)
    return code, runner.summary(name, report, notes, ended)


def by_pytest(folder: Path, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run pytest in `cwd`, or else in `folder`, with what is installed in `folder`."""
    out, errors = folder / "stdout", folder / "stderr"
    command = ["-q", "-p", "no:cacheprovider", *arguments]
    code = _forked(_run, LIMIT_SECONDS, out, errors, environment(folder), command, cwd)
    assert code is not None, f"pytest hangs: {errors.read_text()}"
    return subprocess.CompletedProcess(command, code, out.read_text(), errors.read_text())


def _run(arguments: Sequence[str]) -> int:
    return pytest.main(list(arguments))


class Popen:
    """subprocess.Popen for `python -m MODULE` and `python -c SCRIPT`, as far as it is used here.

    What goes to a pipe is read at the end, and so are errors.
    """

    before: Callable[[], object] = os.getpid
    """What the process does before it runs the program."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        stdout: Any,
        stderr: Any = None,
        cwd: str | Path | None = None,
        start_new_session: bool = False,
        **_: Any,
    ) -> None:
        interpreter, self._option, *self.args = command
        assert (interpreter, self._option in ("-m", "-c")) == (sys.executable, True), command
        self._pipe = stdout is subprocess.PIPE
        out = _temporary() if self._pipe else Path(stdout.name)
        self._out = out if out.is_file() else Path(os.devnull)  # this process's own stderr has no name
        errors = self._out if stderr in (None, subprocess.STDOUT) else Path(stderr.name)
        run = _run_module if self._option == "-m" else _run_text
        given = (self.before, *self.args)
        folder = Path(cwd or Path.cwd())
        self._process = _started(run, self._out, errors, dict(env), given, folder, start_new_session)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        self.wait(timeout)
        text = self._out.read_text() if self._pipe else ""
        if self._pipe:
            self._out.unlink()
        return text, None

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


def fork_from(module: Any, patch: pytest.MonkeyPatch, start: Callable[..., Any] = Popen) -> None:
    """Let a module fork what it would start with subprocess."""
    names = ("PIPE", "STDOUT", "CompletedProcess", "TimeoutExpired")
    known = {name: getattr(subprocess, name) for name in names}
    patch.setattr(module, "subprocess", SimpleNamespace(Popen=start, **known))


def accelz_check(folder: Path, *options: str, name: str = "liar") -> Result:
    """What the command `accelz check` does with a backend that is installed in `folder`."""
    with pytest.MonkeyPatch.context() as patch:
        for variable in set(os.environ) - environment(folder).keys():
            patch.delenv(variable)
        patch.setenv("PYTHONPATH", environment(folder)["PYTHONPATH"])
        patch.syspath_prepend(str(folder))
        fork_from(runner, patch)
        return CliRunner().invoke(cli.app, ["check", name, *options])


def answered(folder: Path, *options: str, name: str = "liar") -> tuple[int, dict[str, Any]]:
    """Exit code and answer of `accelz check --json`."""
    done = accelz_check(folder, "--json", *options, name=name)
    assert done.stdout, done.output
    return done.exit_code, json.loads(done.stdout)


def _run_module(given: tuple[Callable[[], object], *tuple[str, ...]]) -> int:
    before, name, *arguments = given
    before()
    return _main((name, *arguments), lambda: runpy.run_module(name, run_name="__main__", alter_sys=True))


def _run_text(given: tuple[Callable[[], object], *tuple[str, ...]]) -> int:
    before, text, *arguments = given
    before()
    return _main(("-c", *arguments), lambda: exec(compile(text, "<text>", "exec"), {"__name__": "__main__"}))


def python(folder: Path, script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a process that has chosen no backend and sees the distributions in `folder`."""
    out, errors = folder / "stdout", folder / "stderr"
    given = (os.getpid, textwrap.dedent(script))
    code = _forked(_run_text, SCRIPT_SECONDS, out, errors, environment(folder, **variables), given)
    assert code is not None, f"the script hangs: {errors.read_text()}"
    return subprocess.CompletedProcess(script, code, out.read_text(), errors.read_text())


def job(
    folder: Path, script: Path, arguments: Sequence[str], ranks: int, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a script on ranks of one thread each; when a rank fails, the others end with it. The result has the
    first exit code that is not 0, and what all ranks printed."""
    running = started_ranks(folder, script, arguments, ranks, **variables)
    code = ended_together(running, time.monotonic() + LIMIT_SECONDS)
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
    goes to `folder`, into stdout-RANK and stderr-RANK. Each rank holds the port of rank 0's store."""
    with held_port() as held:
        port = held.getsockname()[1]
        place = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        running = []
        for rank in range(ranks):
            out, errors = _outputs(folder, rank)
            for path in (out, errors):
                path.write_text("")  # there also where a rank is killed before it begins
            own = place | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
            given = environment(folder, OMP_NUM_THREADS="1", **own, **variables)
            running.append(_started(_run_script, out, errors, given, (held, str(script), *arguments)))
    return running


def held_port() -> socket.socket:
    """A socket of this machine with a port of its own, that a server which is told the port can listen at.

    While it is open, nothing else is given the port: who asks for any gets one that nobody has bound.
    Both set SO_REUSEADDR, as torch's stores do, and this socket does not listen, so the server may bind it.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


def _outputs(folder: Path, rank: int) -> tuple[Path, Path]:
    return folder / f"stdout-{rank}", folder / f"stderr-{rank}"


def ended_together(running: Sequence[BaseProcess], deadline: float) -> int | None:
    """The job's exit code; None where it was killed at the deadline, with its stacks printed."""
    codes: list[int | None] = [None]
    while None in codes and not any(codes) and time.monotonic() < deadline:
        time.sleep(0.02)
        codes = [process.exitcode for process in running]
    if not any(codes):
        _print_stacks(running)
    for process in running:
        if process.exitcode is None:
            process.kill()
        process.join()
    return next(filter(None, codes), None if None in codes else 0)


def _print_stacks(running: Sequence[BaseProcess]) -> None:
    """Have what still runs print, on its stderr, where each of its threads is."""
    running = [process for process in running if process.exitcode is None]
    for process in running:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGUSR1)
    time.sleep(STACKS_SECONDS if running else 0)


def _run_script(given: tuple[socket.socket, *tuple[str, ...]]) -> int:
    _port, *command = given
    torch.set_num_threads(1)
    sys.path.insert(0, str(Path(command[0]).parent))
    return _main(command, lambda: runpy.run_path(command[0], run_name="__main__"))


def _main(command: Sequence[str], run: Callable[[], object]) -> int:
    """The exit code of a program."""
    sys.argv = list(command)
    try:
        run()
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        return error.code if isinstance(error.code, int) else int(error.code is not None)
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
    cwd: Path | None = None,
) -> int | None:
    """Exit code of a process that ends with `call(argument)`; None where it was killed after `seconds`, with
    its stacks printed."""
    for path in (out, errors):
        path.unlink(missing_ok=True)
    process = _started(call, out, errors, variables, argument, cwd)
    process.join(seconds)
    if process.exitcode is None:
        _print_stacks([process])
        process.kill()
        process.join()
        return None
    return process.exitcode


def _started(
    call: Callable[[Any], int],
    out: Path,
    errors: Path,
    variables: dict[str, str],
    argument: Any,
    cwd: Path | None = None,
    session: bool = False,
) -> BaseProcess:
    """The process, in `cwd`, or else where `out` is. What it prints is added to what is there. session: of
    its own, so that it can be killed with what it starts."""
    cluster.prepare()
    context = multiprocessing.get_context("forkserver")
    given = (call, argument, variables, str(out), str(errors), str(cwd or out.parent), session)
    process = context.Process(target=_child, args=given)
    process.start()
    return process


def _temporary() -> Path:
    number, path = tempfile.mkstemp()
    os.close(number)
    return Path(path)


def _child(
    call: Callable[[Any], int],
    argument: Any,
    variables: dict[str, str],
    out: str,
    errors: str,
    cwd: str,
    session: bool,
) -> None:
    if session:
        os.setsid()
    _serve_from_the_same_server()
    os.environ.clear()
    os.environ.update(variables)
    tempfile.tempdir = None  # as the server's environment had it
    sys.path[:0] = variables["PYTHONPATH"].split(os.pathsep)
    for stream, path in ((1, out), (2, errors)):
        with open(path, "a") as file:
            os.dup2(file.fileno(), stream)
    faulthandler.register(signal.SIGUSR1, file=2)
    os.chdir(cwd)
    code = call(argument)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def threads_of_the_server() -> list[str]:
    """The names of its threads, when it has imported all that ranks are forked with. A lock that another one
    than the first holds while a rank is forked is never released in the rank: there is to be one thread."""
    cluster.prepare()
    forked = multiprocessing.get_context("forkserver").Process(target=os.getpid)
    forked.start()
    forked.join()
    threads = Path(f"/proc/{forkserver._forkserver._forkserver_pid}/task")  # type: ignore[attr-defined]
    return [(thread / "comm").read_text().strip() for thread in threads.iterdir()]


def _serve_from_the_same_server() -> None:
    """Have ranks that this process starts forked from the server that has forked it, which it knows; it would
    start one of its own, and import torch again."""
    forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]
    cluster.ensure_running = lambda: None  # type: ignore[attr-defined]
