"""Runs the kit in a separate process, so that a crash of a device library is a result like any other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from accelz.conformance import TEST_SECONDS, progress
from accelz.discovery import disabled_names, installed
from accelz.errors import AccelzError, BackendNotFoundError, BackendUnavailableError

NO_TESTS, USAGE = 5, 4  # pytest's exit codes
ISOLATED = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
"""Environment variables that keep the user's other pytest plugins and options out of the run."""

LOOK_SECONDS = 0.1
START_SECONDS = 60.0
END_SECONDS = 5.0


@dataclass(frozen=True)
class Ended:
    """How the kit's process ended. output: what it printed into a pipe. silent: ended because it was."""

    code: int
    output: str
    silent: bool

    @property
    def how(self) -> str:
        if self.silent:
            return "was aborted because it produced no output for too long"
        return f"ended by signal {-self.code}" if self.code < 0 else f"ended with code {self.code}"


def run(name: str, only: str | None, show: bool, timeout: float = TEST_SECONDS) -> dict[str, Any]:
    """Run the kit on the backend `name` and return its summary, with `ok` and `exit_code` added.

    only: an expression for pytest's -k. show: let pytest's output through to stderr. timeout: seconds that a
    test may take; if it cannot be interrupted, the kit's process is ended after twice as long.
    Raises AccelzError if nothing could be run: the backend or pytest is missing, no test matches, or the
    device cannot be used here.
    """
    _require(name)
    with tempfile.TemporaryDirectory(prefix="accelz-check-") as folder:
        report, notes = Path(folder, "report.jsonl"), Path(folder, "notes")
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *arguments(name, only, timeout, report, notes)],
            stdout=sys.stderr if show else subprocess.PIPE,
            stderr=None if show else subprocess.STDOUT,
            cwd=folder,
            env=_environment(),
            text=True,
        )
        ended = supervise(process, report, 2 * timeout)
        if ended.code == NO_TESTS:
            raise AccelzError(f"no test of the kit matches {only!r}; -k takes parts of names, as in pytest")
        return summary(name, report, notes, ended)


def supervise(process: subprocess.Popen[str], report: Path, limit: float) -> Ended:
    """Wait for the kit's process to end.

    If nothing has been written to `report` for `limit` seconds, the process gets a SIGABRT, so that it prints
    its stacks (pytest turns faulthandler on), and is killed if that does not end it.
    """
    started, over = time.time() + START_SECONDS, 0.0
    while True:
        try:
            output = process.communicate(timeout=LOOK_SECONDS)[0]
            return Ended(process.returncode, output or "", over > 0)
        except subprocess.TimeoutExpired:
            last = report.stat().st_mtime if report.exists() else started
        over = time.time() - last - limit
        if over > 0:
            process.send_signal(signal.SIGKILL if over > END_SECONDS else signal.SIGABRT)


def _require(name: str) -> None:
    if find_spec("pytest") is None:
        raise AccelzError("the conformance kit needs pytest: pip install 'accelz[check]'")
    if name in disabled_names(os.environ):
        raise BackendUnavailableError(f"backend {name!r} is switched off by ACCELZ_DISABLE")
    if not installed(name):
        names = ", ".join(e.name for e in installed()) or "none"
        raise BackendNotFoundError(
            f"no backend called {name!r} is installed (installed: {names}); pip install accelz-{name}"
        )


def arguments(name: str, only: str | None, timeout: float, report: Path, notes: Path) -> list[str]:
    """Return pytest's arguments for a run of the kit that leaves its results in `report` and `notes`.

    The other arguments as in `run`.
    """
    options = {"device": name, "timeout": str(timeout), "report": str(report), "progress": str(notes)}
    return [
        *("-c", os.devnull, "-q", "--tb=short", "-p", "no:cacheprovider", "-p", "accelz.conformance.plugin"),
        "--no-summary",  # the caller prints it
        *(("-k", only) if only else ()),
        *(text for option, value in options.items() for text in (f"--accelz-{option}", value)),
        *("--pyargs", "accelz.conformance"),
    ]


def _environment() -> dict[str, str]:
    path = [str(Path(p).absolute()) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    return {**os.environ, **ISOLATED, "PYTHONPATH": os.pathsep.join(path)}


def summary(name: str, report: Path, notes: Path, ended: Ended) -> dict[str, Any]:
    """Read the files that the kit's process has left; raises AccelzError if it refused to run."""
    events = [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
    if ended.code == USAGE:
        refused = next((e["reason"] for e in events if e["event"] == "refused"), None)
        raise AccelzError(refused or f"the kit did not run: {ended.output.strip() or 'see above'}")
    found = next((e for e in events if e["event"] == "summary"), None)
    if found is None:
        found = _crashed(name, events, ended, progress.read(notes))
    found.pop("event", None)
    return {**found, "ok": ended.code == 0, "exit_code": ended.code}


def _crashed(name: str, events: list[dict[str, Any]], ended: Ended, method: str) -> dict[str, Any]:
    """Summarise a run whose process ended inside a test: that test failed. method: what it was in, or ""."""
    results = [e for e in events if e["event"] == "result"]
    test = next((e["test"] for e in reversed(events) if e["event"] == "start"), "before the first test")
    where = f"{method}: must return\n  got:  " if method else ""
    message = f"{where}the process {ended.how} in {test}"
    failure: dict[str, Any] = {
        "test": test,
        "methods": [method] if method else [],
        "contract": "the process must survive",
        "broken": method,
        "message": f"{message}\n{ended.output[-2000:]}",
        "detail": f"{message}\n{ended.output[-20_000:]}",
        "proves": [],
        "needs": [],
    }
    outcomes = [e["outcome"] for e in results]
    return {
        "device": name,
        "passed": outcomes.count("passed"),
        "failed": outcomes.count("failed") + 1,
        "skipped": outcomes.count("skipped"),
        "seconds": 0.0,
        "capabilities": [],
        "failures": [*(e for e in results if e["outcome"] == "failed"), failure],
    }
