"""The pytest plugin of the kit: two options, and everything else only where `--accelz-device` is given.

pytest loads this in every run of an environment that has accelz, so it imports nothing heavy.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

MARKERS = (
    "accelz_about(*methods): the interface methods whose contract the test is about",
    "accelz_proves(capability): the test passes exactly where the device has the capability",
    "accelz_needs(*capabilities): the test makes sense only where these capabilities are declared",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("accelz", "accelz conformance kit")
    group.addoption("--accelz-device", metavar="NAME", help="the accelz backend to put to the test")
    group.addoption("--accelz-report", metavar="FILE", help="write results there, one JSON object a line")


def pytest_configure(config: pytest.Config) -> None:
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    name = config.getoption("accelz_device")
    if name:
        _require(name)
        os.environ["ACCELZ_DEVICE"] = name  # the ranks that tests start must choose the same
        _register(config, name)


def _register(config: pytest.Config, name: str) -> None:
    from accelz.conformance import fixtures
    from accelz.conformance.report import Report

    target = config.getoption("accelz_report")
    config.pluginmanager.register(fixtures, "accelz-fixtures")
    config.pluginmanager.register(Report(name, Path(target) if target else None), "accelz-report")


def _require(name: str) -> None:
    """Stop where the backend is not there at all; a broken one is the kit's business."""
    from accelz.discovery import Status, list_backends

    rows = list_backends()
    row = next((r for r in rows if r.name == name), None)
    if row is None:
        names = ", ".join(r.name for r in rows) or "none"
        raise pytest.UsageError(f"--accelz-device: no backend called {name!r} is installed (there: {names})")
    if row.status in (Status.UNAVAILABLE, Status.DISABLED):
        raise pytest.UsageError(f"--accelz-device: {name!r} cannot be tested here: {row.reason}")
