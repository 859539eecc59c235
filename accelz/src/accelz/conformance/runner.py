"""Runs the kit in a process of its own, so that a crash of a device library is a result like any other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from accelz.discovery import disabled_names, installed
from accelz.errors import AccelzError, BackendNotFoundError, BackendUnavailableError

TEST_SECONDS = 120
NO_TESTS, USAGE = 5, 4  # pytest's exit codes


def run(name: str, only: str | None, show: bool) -> dict[str, Any]:
    """Run the kit on the backend `name` and return its summary, with `ok` and `exit_code` added.

    only: an expression for pytest's -k. show: let pytest's output through to stderr. Raises AccelzError
    where nothing could be run: the backend or pytest is missing, or the device cannot be used here.
    """
    _require(name)
    with tempfile.TemporaryDirectory(prefix="accelz-check-") as folder:
        report = Path(folder, "report.jsonl")
        done = subprocess.run(
            _command(name, only, report),
            stdout=sys.stderr if show else subprocess.PIPE,
            stderr=None if show else subprocess.STDOUT,
            cwd=folder,
            env=_environment(),
            check=False,
            text=True,
        )
        if done.returncode == NO_TESTS:
            raise AccelzError(f"no test of the kit matches {only!r}; -k takes parts of names, as pytest's")
        if done.returncode == USAGE:
            raise AccelzError(f"the kit did not run: {(done.stdout or '').strip() or 'see above'}")
        return _summary(name, report, done.returncode, done.stdout or "")


def _require(name: str) -> None:
    if find_spec("pytest") is None:
        raise AccelzError("the conformance kit needs pytest: pip install 'accelz[check]'")
    if name in disabled_names(os.environ):
        raise BackendUnavailableError(f"backend {name!r} is switched off by ACCELZ_DISABLE")
    if not installed(name):
        names = ", ".join(e.name for e in installed()) or "none"
        raise BackendNotFoundError(
            f"no backend called {name!r} is installed (there: {names}); pip install accelz-{name}"
        )


def _command(name: str, only: str | None, report: Path) -> list[str]:
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "-p", "no:cacheprovider", "-q", "--tb=short"]
    command += ["--no-summary", "-p", "accelz.conformance.plugin"]  # the summary is the caller's to print
    if find_spec("pytest_timeout"):
        command += ["-p", "pytest_timeout", f"--timeout={TEST_SECONDS}"]
    command += ["-k", only] if only else []
    return [
        *command,
        "--accelz-device",
        name,
        "--accelz-report",
        str(report),
        "--pyargs",
        "accelz.conformance",
    ]


def _environment() -> dict[str, str]:
    """Without the user's other pytest plugins; what they do to a run is not the backend's business."""
    path = [str(Path(p).absolute()) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    isolated = {
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTEST_ADDOPTS": "",
        "PYTHONPATH": os.pathsep.join(path),
    }
    return {**os.environ, **isolated}


def _summary(name: str, report: Path, code: int, output: str) -> dict[str, Any]:
    events = [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
    summary = next((e for e in events if e["event"] == "summary"), None)
    if summary is None:
        summary = _crashed(name, events, code, output)
    summary.pop("event", None)
    return {**summary, "ok": code == 0, "exit_code": code}


def _crashed(name: str, events: list[dict[str, Any]], code: int, output: str) -> dict[str, Any]:
    """The kit's process ended inside a test: that test is the failure."""
    results = [e for e in events if e["event"] == "result"]
    test = next((e["test"] for e in reversed(events) if e["event"] == "start"), "before the first test")
    how = f"by signal {-code}" if code < 0 else f"with code {code}"
    detail = f"the process ended {how} in {test}\n{output[-2000:]}"
    failure: dict[str, Any] = {
        "test": test,
        "methods": [],
        "contract": "the process must survive",
        "broken": "",
        "message": detail,
        "detail": detail,
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
