"""The engine's own tests on any device, for `zero check`.

They come with the wheel, in the folder `zero_conformance` beside the package: to the engine, whose warnings
name the caller's line, they are users. Where zero is installed from a checkout, they are its `tests`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from xml.etree import ElementTree

import accelz
from zero.errors import UsageError

if TYPE_CHECKING:
    import pytest

NEEDED = {"pytest": "pytest", "pytest_timeout": "pytest-timeout", "xdist": "pytest-xdist"}
TEST_SECONDS = 300
FAILED, NO_TESTS = 1, 5  # pytest's exit codes
ISOLATED = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
"""Environment variables that keep the user's other pytest plugins and options out of the run."""


@dataclass(frozen=True)
class Counts:
    """How many tests ended how. failed: those that could not be set up among them."""

    passed: int
    failed: int
    skipped: int

    def __str__(self) -> str:
        failed = f"{self.failed} failed, " if self.failed else ""
        return f"{failed}{self.passed} passed, {self.skipped} skipped"


def run(
    device: str, loop: Literal["engine", "plain"], only: str | None, max_ranks: int, workers: int
) -> Counts:
    """Run the tests on the backend `device`, in processes of their own; pytest's output goes to stdout.

    loop: the loop that most tests train in. only: an expression for pytest's -k. max_ranks: tests with more
    ranks are skipped. workers: how many processes share the tests. Raises AccelzError if the device cannot be
    used, UsageError if the tests or what they need are missing, no test matches, or pytest gives up.
    """
    _require_tools()
    accelz.use(device)
    with tempfile.TemporaryDirectory(prefix="zero-check-") as folder:
        report = Path(folder, "report.xml")
        options = ("--device", device, "--loop", loop, "--max-ranks", str(max_ranks))
        processes = ("-n", str(workers if workers > 1 else 0))  # 0: pytest's own
        chosen = ("-k", only) if only else ()
        command = [
            *_pytest(place := folder_of_tests()),
            f"--junitxml={report}",
            *options,
            *processes,
            *chosen,
        ]
        code = subprocess.run(command, cwd=place, env=_environment(), check=False).returncode
        if code == NO_TESTS:
            raise UsageError(f"no test for {device} matches {only!r}; -k takes parts of names, as in pytest")
        if code not in (0, FAILED):
            raise UsageError(f"the tests did not run to their end: pytest has ended with code {code}")
        return _counts(report)


def folder_of_tests() -> Path:
    """The folder that has `tests` in it. Raises UsageError if there is none."""
    here = Path(__file__).resolve()
    places = (here.parents[1] / "zero_conformance", here.parents[3])
    for place in places:
        if (place / "tests" / "zero" / "conftest.py").is_file():
            return place
    raise UsageError(f"the engine's tests are not in {places[0]}: install accelz-zero from its wheel")


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """Have pytest name what fails at once: the tests take long, and may be cut off."""
    if not report.failed:
        return None
    category = "failed" if report.when == "call" else "error"
    return category, f"\n{category}: {report.nodeid}\n", category.upper()


def _require_tools() -> None:
    missing = [name for module, name in NEEDED.items() if find_spec(module) is None]
    if missing:
        raise UsageError(f'zero check needs {", ".join(missing)}: pip install "accelz-zero[conformance]"')


def _pytest(place: Path) -> list[str]:
    """pytest with the settings that the tests have in their repository, and no others."""
    settings = (
        *("-c", os.devnull, "--rootdir", str(place), "-o", f"pythonpath={place}"),
        *("-p", "no:cacheprovider", "-p", "pytest_timeout", "-p", "xdist.plugin", "-p", __name__),
        *("-q", "--strict-markers", f"--timeout={TEST_SECONDS}", "--timeout-method=thread"),
        *("--dist", "loadfile", "--no-loadscope-reorder"),
    )
    return [sys.executable, "-m", "pytest", *settings, str(place / "tests" / "zero")]


def _environment() -> dict[str, str]:
    path = [str(Path(p).absolute()) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    return {**os.environ, **ISOLATED, "PYTHONPATH": os.pathsep.join(path)}


def _counts(report: Path) -> Counts:
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    tests, failures, errors, skipped = (
        sum(int(suite.get(name, 0)) for suite in suites)
        for name in ("tests", "failures", "errors", "skipped")
    )
    failed = failures + errors
    return Counts(tests - failed - skipped, failed, skipped)
