"""The command line: tables for people, JSON on stdout alone, one clean message for an error."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from accelz import cli
from accelz.conformance import runner
from accelz.roles import kernels

from .fake_distribution import environment, good, install
from .forked import accelz_check

NOISY = "print('hello from a plugin')\n"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of fake distributions, and no choice in the environment."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("ACCELZ_DEVICE", "ACCELZ_DISABLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


def _run(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, list(map(str, arguments)))


def _line(output: str, name: str) -> str:
    return next(line for line in output.splitlines() if f" {name} " in f" {line} ")


def test_version() -> None:
    done = _run("--version")
    assert done.exit_code == 0
    assert done.stdout == "accelz 0.1.0, interface 2\n"


def test_list_shows_every_state_and_the_choice(site: Path) -> None:
    install(site, "best", good("best", 500, reason="two of them"))
    install(site, "off", good("off", 900, available=False, reason="no [bold] device"))
    install(site, "broken", "import nothing_of_that_name")
    done = _run("list")
    assert done.exit_code == 0
    assert "available" in _line(done.stdout, "best")
    assert _line(done.stdout, "best").strip().startswith("→")
    assert "no [bold] device" in _line(done.stdout, "off")
    assert "ModuleNotFoundError: No module named 'nothing_of_that_name'" in _line(done.stdout, "broken")
    assert "selected: best (the highest priority of those available, 500)" in done.stdout


@pytest.mark.parametrize(
    ("device", "disable", "selected", "why"),
    [
        ("", "", "foo", "the highest priority of those available, 500"),
        ("cpu", "", "cpu", "ACCELZ_DEVICE=cpu"),
        ("", "foo", "cpu", "the highest priority of those available, 0"),
        ("foo", "foo", None, "ACCELZ_DEVICE=foo is disabled: switched off by ACCELZ_DISABLE"),
        ("xqz", "", None, "ACCELZ_DEVICE=xqz is not installed. The names known here are "),
        ("fo", "", None, "ACCELZ_DEVICE=fo is not installed. Did you mean 'foo'? The names known here are "),
        ("", "foo,cpu", None, "none is available"),
        (
            "two",
            "",
            None,
            "ACCELZ_DEVICE=two is the name of two backends, of aaa-two and accelz-two: uninstall",
        ),
        (
            "cpu:1",
            "",
            None,
            "ACCELZ_DEVICE=cpu:1 is not installed. ACCELZ_DEVICE names a backend and no device",
        ),
    ],
)
def test_list_json_follows_the_environment(
    site: Path, monkeypatch: pytest.MonkeyPatch, device: str, disable: str, selected: str | None, why: str
) -> None:
    install(site, "foo", NOISY + good("foo", 500))
    install(site, "two", good("two", 5))
    install(site, "two", good("two", 5), distribution="aaa-two")
    monkeypatch.setenv("ACCELZ_DEVICE", device)
    monkeypatch.setenv("ACCELZ_DISABLE", disable)
    done = _run("list", "--json")
    assert done.exit_code == (1 if selected is None else 0)
    answer = json.loads(done.stdout)
    assert answer["selected"] == selected
    assert answer["why"].startswith(why)
    assert [row["name"] for row in answer["backends"] if row["selected"]] == [selected] * bool(selected)
    given = {"ACCELZ_DEVICE": device, "ACCELZ_DISABLE": disable}
    assert answer["environment"] == {name: value for name, value in given.items() if value}


def test_info_says_what_a_device_can_do(site: Path) -> None:
    facts = json.loads(_run("info", "cpu", "--json").stdout)
    assert facts["name"] == "cpu"
    assert facts["device"] == "cpu"
    assert facts["device_count"] == 1
    assert facts["capabilities"]["storage_resize"] is True
    assert "float32" in facts["dtypes"]
    assert set(facts["memory"]) == {"allocated", "peak", "capacity", "free"}
    assert set(facts["kernels"]) == set(kernels.NAMES)
    assert facts["flat_buffers"]
    assert facts["collectives"]
    assert facts["torch"].startswith("2.")
    table = _run("info", "cpu").stdout
    assert "storage_resize" in _line(table, "capabilities")
    assert "GiB" in table


def test_info_of_a_device_that_has_no_counters_before_it_is_taken(site: Path) -> None:
    shy = """    accelerator.name = 'shy'
    def stats():
        raise RuntimeError('no device was taken')
    accelerator.memory.stats = stats"""
    install(site, "shy", good("shy").replace("    accelerator.name = 'shy'", shy))
    assert json.loads(_run("info", "shy", "--json").stdout)["memory"] is None
    done = _run("info", "shy")
    assert done.exit_code == 0
    assert "unknown until a process is bound" in _line(done.stdout, "memory")


@pytest.mark.parametrize("command", ["info", "check"])
def test_an_error_is_one_message_and_code_2(site: Path, command: str) -> None:
    done = _run(command, "nosuch")
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: no backend called 'nosuch' is installed")
    assert "Traceback" not in done.stderr


def test_check_without_pytest_says_what_to_install(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "find_spec", lambda name: None)
    done = _run("check", "cpu")
    assert done.exit_code == 2
    assert "pip install 'accelz[check]'" in done.stderr


def test_check_refuses_what_is_switched_off_or_not_there(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(site, "off", good("off", available=False, reason="no such device"))
    monkeypatch.setenv("PYTHONPATH", str(site))
    done = _run("check", "off", "--json")
    assert done.exit_code == 2
    assert "cannot be tested here: no such device" in done.stderr
    monkeypatch.setenv("ACCELZ_DISABLE", "cpu")
    done = _run("check", "cpu")
    assert done.exit_code == 2
    assert "switched off by ACCELZ_DISABLE" in done.stderr


SOUND = {
    "device": "foo",
    "passed": 9,
    "failed": 0,
    "skipped": 1,
    "not_run": 0,
    "seconds": 2.0,
    "ranks_tested": 1,
    "unwritten": [],
    "versions": {"torch": "2"},
    "operators": {"core": {"passed": 3, "failed": 0}},
    "interrupted": False,
    "not_tried": [],
    "capabilities": [],
    "failures": [],
    "tests": {"a": "skipped"},
    "ok": True,
}
UNTESTED = [{"what": "collectives between ranks", "needs": "2 devices"}]


@pytest.mark.parametrize(
    ("options", "untested", "code", "verdict"),
    [
        ([], [], 0, "foo passes: 9 passed, 0 failed, 1 skipped in 2.0 s"),
        ([], UNTESTED, 3, "foo is NOT FULLY TESTED, and passes what could be tested here: 9 passed"),
        (["--allow-untested"], UNTESTED, 0, "foo is NOT FULLY TESTED"),
        (["-k", "Rng"], UNTESTED, 0, "foo passes the tests that match 'Rng': 9 passed"),
    ],
)
def test_what_could_not_be_tested_is_said_and_has_a_code_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    untested: list[dict[str, str]],
    code: int,
    verdict: str,
) -> None:
    summary = {**SOUND, "not_tried": untested}
    monkeypatch.setattr(runner, "run", lambda *_, **__: dict(summary))
    done = _run("check", "foo", *options)
    assert done.exit_code == code
    assert verdict in done.stdout
    said = "NOT TESTED: collectives between ranks; needs 2 devices"
    assert (said in done.stdout) == (bool(untested) and "-k" not in options)
    answer = json.loads(_run("check", "foo", "--json", *options).stdout)
    assert (answer["ok"], answer["exit_code"]) == (not code, code)
    assert answer["not_tried"] == untested


def test_a_report_is_written_beside_what_people_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what was better before is not simply said to pass."""
    monkeypatch.setattr(runner, "run", lambda *_, **__: dict(SOUND))
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    done = _run("check", "foo", "--report", first)
    assert (done.exit_code, "foo passes: " in done.stdout) == (0, True)
    assert first.read_text() == _run("check", "foo", "--json").stdout.rstrip()
    assert json.loads(first.read_text())["selection"] == ""
    assert _run("check", "foo", "--report", first, "--quick").exit_code == 0
    assert json.loads(first.read_text())["selection"] == "the quick tests"
    first.write_text(json.dumps({**SOUND, "tests": {"a": "passed"}}))
    done = _run("check", "foo", "--report", second, "--against", first)
    assert done.exit_code == json.loads(second.read_text())["exit_code"] == 1
    assert "foo passes, but less than before: " in done.stdout
    nowhere = tmp_path / "nowhere" / "report.json"
    done = _run("check", "foo", "--report", nowhere)
    assert (done.exit_code, f"there is no folder {nowhere.parent}" in done.stderr) == (2, True)
    done = _run("check", "foo", "--report", tmp_path)
    assert (done.exit_code, "Invalid value for '--report'" in done.stderr) == (2, True)


@pytest.mark.parametrize("seconds", ["inf", "nan", "1e300", "0.5"])
def test_a_time_limit_that_is_none(seconds: str) -> None:
    done = _run("check", "cpu", "--timeout", seconds)
    assert done.exit_code == 2
    assert f"--timeout is {float(seconds):g}; it must be from 1 to 1e+06 seconds" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("factor", ["x", "0", "nan", "inf", ""])
def test_patience_that_is_no_factor(monkeypatch: pytest.MonkeyPatch, factor: str) -> None:
    monkeypatch.setenv("ACCELZ_PATIENCE", factor)
    done = _run("check", "cpu")
    assert done.exit_code == 2
    assert f"ACCELZ_PATIENCE is {factor!r}" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("columns", ["80", "200"])
def test_a_command_to_type_is_not_cut(site: Path, monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    command = "pip install accelz-foo[" + "a" * 60 + "]"
    install(site, "foo", good("foo", available=False, reason=f"no library: {command}"))
    assert command in _run("list").stdout


def test_a_tie_is_stated(site: Path) -> None:
    install(site, "foo", good("foo", 0))
    said = "selected: cpu (the highest priority of those available, 0, as that of foo: ACCELZ_DEVICE decides"
    assert said in _run("list").stdout


@pytest.mark.parametrize("columns", ["80", "200"])
def test_a_broken_row_is_one_line(site: Path, monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    install(site, "foo", f"raise ImportError({'a long story ' * 30!r})")
    before = len(_run("list").stdout.splitlines())
    install(site, "bar", "import nothing_of_that_name")
    monkeypatch.setenv("COLUMNS", columns)
    assert len(_run("list").stdout.splitlines()) == before + 1


LOUD = """
import atexit, os
os.system("echo from a program")
os.write(1, b"from C\\n")
print("from Python")
atexit.register(print, "at exit")
"""


def test_nothing_that_a_backend_prints_is_in_the_json(tmp_path: Path) -> None:
    install(tmp_path, "foo", LOUD + good("foo"))
    command = [sys.executable, "-m", "accelz.cli", "list", "--json"]
    done = subprocess.run(
        command, env=environment(tmp_path), capture_output=True, text=True, timeout=60, check=False
    )
    assert {row["name"] for row in json.loads(done.stdout)["backends"]} >= {"foo", "cpu"}
    for said in ("from a program", "from C", "from Python", "at exit"):
        assert done.stderr.count(said) == 1


@pytest.mark.slow
def test_check_prints_a_table_of_failures(tmp_path: Path) -> None:
    install(tmp_path, "foo", good("foo").replace("accelerator.name = 'foo'", "accelerator.name = 'bar'"))
    command = [sys.executable, "-m", "accelz.cli", "check", "foo", "-k", "load_gives_every_role or TestRng"]
    done = subprocess.run(
        command, env=environment(tmp_path), capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 1
    assert "Accelerator.name: must be 'foo'" in done.stdout
    assert "foo does not conform: 4 passed, 1 failed, 1 skipped" in done.stdout  # there is one CPU
    assert "Traceback" not in done.stdout


@pytest.mark.slow
def test_check_says_what_a_capability_failed_and_what_a_selection_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boast = "accelerator.capabilities = accelz.Capabilities(lazy_graph=True, storage_resize=False)"
    install(
        tmp_path,
        "foo",
        "import accelz\n" + good("foo").replace("return accelerator", f"{boast}; return accelerator"),
    )
    monkeypatch.setenv("COLUMNS", "120")
    done = accelz_check(tmp_path, "-k", "flush_runs or storage_can", name="foo")
    assert done.exit_code == 1
    row = _line(done.stdout, "lazy_graph  ").split()
    assert row == ["lazy_graph", "yes", "failed", "test_flush_runs_recorded_work"]
    assert "works undeclared" in _line(done.stdout, "storage_resize  ")
    assert "What is not declared is not used" in done.stdout
    done = accelz_check(tmp_path, "-k", "TestRng", name="foo")
    assert done.exit_code == 0
    assert "foo passes the tests that match 'TestRng': 4 passed" in done.stdout
    done = accelz_check(tmp_path, "-k", "nothing_of_that_name", name="foo")
    assert done.exit_code == 2
    assert "no test of the kit matches 'nothing_of_that_name'" in done.stderr


def test_the_installed_command(tmp_path: Path) -> None:
    command = Path(sys.executable).with_name("accelz")
    done = subprocess.run(
        [command, "list", "--json"],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    answer = json.loads(done.stdout)
    assert answer["selected"] == "cpu"
    assert done.stderr == ""
