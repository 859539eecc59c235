"""Runs the kit in a separate process, so that a crash of a device library is a result like any other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from accelz.conformance import TEST_SECONDS, progress, results
from accelz.conformance.results import Setting, Verdict
from accelz.discovery import WRITTEN_FOR, disabled_names, how_to_have, inspect, installed, meant
from accelz.errors import AccelzError, BackendError, BackendNotFoundError, BackendUnavailableError

FAILED, USAGE, NO_TESTS = 1, 4, 5  # pytest's exit codes; the first also where Python cannot start it
ORDINARY = range(6)
"""pytest's exit codes: any other is that of a process that something else has ended."""
ISOLATED = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
"""Environment variables that keep the user's other pytest plugins and options out of the run."""

MOST_CRASHES = 10
"""After so many, the tests that are left are not run: each costs a new process."""
LOOK_SECONDS = 0.1
START_SECONDS = 60.0
END_SECONDS = 5.0


@dataclass(frozen=True)
class Ended:
    """How the kit's process ended. output: what it printed into a pipe. silent: ended because it was.
    interrupted: ended with this one, before its time."""

    code: int
    output: str
    silent: bool
    interrupted: bool = False

    @property
    def how(self) -> str:
        if self.silent:
            return "was aborted because it produced no output for too long"
        if self.code >= 0:
            return f"ended with code {self.code}"
        return f"ended by signal {-self.code} ({signal.Signals(-self.code).name})"


def run(
    name: str, only: str | None, show: bool, timeout: float = TEST_SECONDS, quick: bool = False
) -> dict[str, Any]:
    """Run the kit on the backend `name` and return its summary, with `ok` added: whether no test failed.

    only: an expression for pytest's -k. show: let pytest's output through to stderr. timeout: seconds that a
    test may take; if it cannot be interrupted, the kit's process is ended after twice as long. After a crash
    or such a hang, a new process goes on behind that test.
    Raises AccelzError if nothing could be run: the backend or pytest is missing, no test matches, or the
    device cannot be used here.
    """
    _require(name)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="accelz-check-") as folder:
        report, notes = Path(folder, "report.jsonl"), Path(folder, "notes")
        for _ in range(MOST_CRASHES):
            process = subprocess.Popen(
                [sys.executable, "-m", "pytest", *arguments(name, only, timeout, report, notes, quick)],
                stdout=sys.stderr if show else subprocess.PIPE,
                stderr=None if show else subprocess.STDOUT,
                cwd=folder,
                env=_environment(),
                text=True,
            )
            with _ended_by_a_signal():
                ended = supervise(process, report, 2 * timeout)
            if ended.interrupted or not note_crash(report, notes, ended):
                break
        if ended.code == NO_TESTS and not any(e["event"] == "result" for e in _events(report)):
            raise AccelzError(f"no test of the kit matches {only!r}; -k takes parts of names, as in pytest")
        return {**summary(name, report, notes, ended), "seconds": round(time.monotonic() - began, 2)}


def supervise(process: subprocess.Popen[str], report: Path, limit: float) -> Ended:
    """Wait for the kit's process to end.

    If nothing has been written to `report` for `limit` seconds, the process gets a SIGABRT, so that it prints
    its stacks (pytest turns faulthandler on), and is killed if that does not end it. Ctrl-C ends it too.
    """
    try:
        return _supervised(process, report, limit)
    except KeyboardInterrupt:  # it may come at any time, also while the report is looked at
        process.kill()
        return Ended(process.wait(), "", silent=False, interrupted=True)


def _supervised(process: subprocess.Popen[str], report: Path, limit: float) -> Ended:
    started, over = time.time(), 0.0
    while True:
        try:
            output = process.communicate(timeout=LOOK_SECONDS)[0]
            return Ended(process.returncode, output or "", over > 0)
        except subprocess.TimeoutExpired:
            written = report.stat().st_mtime if report.exists() else 0.0
            last = written if written > started else started + START_SECONDS
        over = time.time() - last - limit
        if over > 0:
            process.send_signal(signal.SIGKILL if over > END_SECONDS else signal.SIGABRT)


@contextmanager
def _ended_by_a_signal() -> Iterator[None]:
    """Have SIGTERM interrupt the with block as Ctrl-C does, so that what has run so far is reported."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _require(name: str) -> None:
    if find_spec("pytest") is None:
        raise AccelzError("the conformance kit needs pytest: pip install 'accelz[check]'")
    if name in disabled_names(os.environ):
        raise BackendUnavailableError(f"backend {name!r} is switched off by ACCELZ_DISABLE")
    entries = installed(name)
    if not entries:
        names = ", ".join(e.name for e in installed()) or "none"
        raise BackendNotFoundError(
            f"no backend called {name!r} is installed (installed: {names}). {how_to_have(name)}"
        )
    (row,) = inspect([meant(name, entries)])
    if row.reason.startswith(WRITTEN_FOR):
        raise BackendError(f"backend {name!r} ({row.distribution}) is {row.reason}")


def arguments(
    name: str, only: str | None, timeout: float, report: Path, notes: Path, quick: bool = False
) -> list[str]:
    """Return pytest's arguments for a run of the kit that leaves its results in `report` and `notes`.

    The other arguments as in `run`.
    """
    options = {"device": name, "timeout": str(timeout), "report": str(report), "progress": str(notes)}
    return [
        *("-c", os.devnull, "-q", "--tb=short", "-p", "no:cacheprovider", "-p", "accelz.conformance.plugin"),
        *("-p", "no:faulthandler"),  # `progress` has it write to a file
        "--no-summary",  # the caller prints it
        *(("-k", only) if only else ()),
        *(("--accelz-quick",) if quick else ()),
        *(text for option, value in options.items() for text in (f"--accelz-{option}", value)),
        *("--pyargs", "accelz.conformance"),
    ]


def _environment() -> dict[str, str]:
    path = [str(Path(p).absolute()) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    return {**os.environ, **ISOLATED, "PYTHONPATH": os.pathsep.join(path)}


def note_crash(report: Path, notes: Path, ended: Ended) -> bool:
    """Add a failure of the test in which the kit's process ended; returns False if it ended in none."""
    events = _events(report)
    if ended.code in ORDINARY or events[-1:] == [] or events[-1]["event"] not in ("start", "result"):
        return False
    test = next(e["test"] for e in reversed(events) if e["event"] == "start")
    with report.open("a") as file:
        file.write(json.dumps({"event": "result", **asdict(_failure(test, notes, ended))}) + "\n")
    return True


def summary(name: str, report: Path, notes: Path, ended: Ended) -> dict[str, Any]:
    """Read the files that the kit's processes have left; raises AccelzError if it refused to run.

    ended: how the last process did.
    """
    events = _events(report)
    if ended.code == USAGE or (not events and ended.code == FAILED):
        refused = next((e["reason"] for e in events if e["event"] == "refused"), None)
        raise AccelzError(refused or f"the kit did not run: {ended.output.strip() or 'see above'}")
    told = [(e.pop("event"), e) for e in events]
    collected = next((e for event, e in told if event == "collected"), {})
    verdicts = {e["test"]: Verdict(**e) for event, e in told if event == "result"}
    failed = any(v.outcome == "failed" for v in verdicts.values())
    if ended.code not in ORDINARY and not ended.interrupted and not failed:
        verdicts["no test"] = _failure("no test", notes, ended)
    found = results.summary(name, Setting(**collected), list(verdicts.values()))
    ok = found["failed"] == 0 and ended.code in (0, NO_TESTS)
    return {**found, "interrupted": ended.interrupted, "ok": ok}


def _events(report: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []


def _failure(test: str, notes: Path, ended: Ended) -> Verdict:
    """The failure of a test in which the kit's process ended."""
    method, stacks = progress.read(notes), progress.read_stacks(notes)
    frame = progress.last_frame(stacks)
    came = f"the process {ended.how} in {test.rpartition('::')[2]}{f', at {frame}' if frame else ''}"
    must = "must return" if ended.silent else "must not end the process"
    told = f"{f'{method}:' if method else 'an operation'} {must}\n  got:  {came}"
    message = results.advised(told, method)
    return Verdict(
        test,
        "failed",
        methods=[method] if method else [],
        contract="the process must survive",
        broken=method,
        message=message,
        detail=f"{message}\n{stacks}\n{ended.output[-20_000:]}",
    )
