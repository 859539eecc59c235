"""`zero check`: what it runs, says and refuses. tests/scripts/test_release.py runs it from a wheel."""

from __future__ import annotations

from pathlib import Path

import pytest

from accelz import selection
from tests.zero.helpers.commands import refused, run
from zero import conformance

pytestmark = [pytest.mark.host, pytest.mark.slow]  # starts pytest
OPTIONS = """
def pytest_addoption(parser):
    for name in ("--device", "--loop", "--max-ranks"):
        parser.addoption(name)
"""
TESTS = """
import pytest
def test_options(request):
    found = [request.config.getoption(name) for name in ("--device", "--loop", "--max-ranks")]
    assert found == ["cpu", "plain", "2"]
def test_wrong():
    assert False
@pytest.fixture
def broken():
    raise ValueError
def test_broken(broken): pass
def test_skipped():
    pytest.skip("not here")
"""


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four tests in place of the engine's."""
    (folder := tmp_path / "tests" / "zero").mkdir(parents=True)
    (folder / "conftest.py").write_text(OPTIONS)
    (folder / "test_few.py").write_text(TESTS)
    monkeypatch.setattr(conformance, "folder_of_tests", lambda: tmp_path)


@pytest.mark.usefixtures("small")
def test_the_exit_code_and_the_last_line_say_how_it_went(capfd: pytest.CaptureFixture[str]) -> None:
    options = ("check", "--device", "cpu", "--loop", "plain", "--max-ranks", 2)
    done = run(*options, "--workers", 2)
    assert (done.exit_code, done.stdout) == (1, "zero on cpu fails: 2 failed, 1 passed, 1 skipped\n")
    at_once = capfd.readouterr().out.partition("=== FAILURES")[0]
    assert "failed: tests/zero/test_few.py::test_wrong\n" in at_once
    assert "error: tests/zero/test_few.py::test_broken\n" in at_once
    done = run(*options, "-k", "options or skipped")
    assert (done.exit_code, done.stdout) == (0, "zero on cpu passes: 1 passed, 1 skipped\n")
    assert "no test for cpu matches 'such'" in refused(*options, "-k", "such")


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "_selected", None)  # the command finds a process that has chosen none
    said = refused("check", "--device", "acme")
    assert said.startswith("error: no backend called 'acme' is installed. Installed: ")


def test_what_the_tests_need_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance, "find_spec", lambda name: None if name == "xdist" else name)
    told = 'zero check needs pytest-xdist: pip install "accelz-zero[conformance]"'
    assert told in refused("check", "--device", "cpu")


def test_a_checkout_has_the_tests() -> None:
    assert (conformance.folder_of_tests() / "tests" / "zero" / "conformance" / "test_check.py").samefile(
        __file__
    )
