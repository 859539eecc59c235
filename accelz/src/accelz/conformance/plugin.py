"""The kit's pytest plugin: its options, and everything else only if `--accelz-device` is given.

pytest loads this in every run in an environment that has accelz, so it imports nothing heavy.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from accelz.conformance import TEST_SECONDS

MARKERS = (
    "accelz_about(*methods): the interface methods whose contract the test is about",
    "accelz_proves(capability): the test passes exactly where the device has the capability",
    "accelz_needs(*capabilities): the test makes sense only where these are declared; it is about the first",
    "accelz_tier(name): the operators that the test tries belong to this tier",
    "accelz_thorough: left out by --quick",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("accelz", "accelz conformance kit")
    group.addoption("--accelz-device", metavar="NAME", help="the accelz backend to test")
    group.addoption(
        "--accelz-report", metavar="FILE", help="file to write results to, one JSON object per line"
    )
    group.addoption("--accelz-progress", metavar="FILE", help="file to record the running backend method in")
    group.addoption(
        "--accelz-quick", action="store_true", help="leave out large cases, leaks and failing ranks"
    )
    group.addoption(
        "--accelz-timeout",
        metavar="SECONDS",
        type=float,
        default=TEST_SECONDS,
        help=f"time limit for each test, in seconds ({TEST_SECONDS:g})",
    )


def pytest_configure(config: pytest.Config) -> None:
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    name = config.getoption("accelz_device")
    if name:
        _require(config, name)
        os.environ["ACCELZ_DEVICE"] = name  # the ranks that tests start must choose the same backend
        _register(config, name)


def _register(config: pytest.Config, name: str) -> None:
    from accelz.conformance import fixtures, progress, watchdog
    from accelz.conformance.report import Reporter

    target, notes = config.getoption("accelz_report"), config.getoption("accelz_progress")
    if notes:
        progress.keep_in_file(Path(notes))
    config.pluginmanager.register(watchdog.Watchdog(config.getoption("accelz_timeout")), "accelz-watchdog")
    config.pluginmanager.register(fixtures, "accelz-fixtures")
    config.pluginmanager.register(Reporter(name, Path(target) if target else None), "accelz-report")


def _require(config: pytest.Config, name: str) -> None:
    """Stop if the backend is missing or cannot be used here; a broken one is for the kit to report."""
    from accelz.discovery import Status, list_backends

    rows = list_backends()
    row = next((r for r in rows if r.name == name), None)
    if row is None:
        names = ", ".join(r.name for r in rows) or "none"
        _refuse(config, f"no backend called {name!r} is installed (installed: {names})")
    elif row.status in (Status.UNAVAILABLE, Status.DISABLED):
        _refuse(config, f"{name!r} cannot be tested here: {row.reason}")


def _refuse(config: pytest.Config, reason: str) -> None:
    target = config.getoption("accelz_report")
    if not target:
        raise pytest.UsageError(f"--accelz-device: {reason}")
    Path(target).write_text(json.dumps({"event": "refused", "reason": reason}) + "\n")
    raise pytest.UsageError  # without a message: whoever reads the file says why
