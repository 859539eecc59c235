"""The command that is run where a device is, on the CPU and made small: every step runs and is reported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scripts.device_check import native, report, tree
from scripts.device_check import plan as planning
from scripts.device_check.__main__ import PYTEST, main
from scripts.device_check.measures import OF_COPY, below_target
from scripts.device_check.outcome import Outcome
from scripts.device_check.plan import LOG, Plan
from scripts.device_check.running import Target, compare, from_rows, rows_of
from scripts.device_check.steps import PLANS, STEPS, attempt
from scripts.paths import absolute

from accelz.roles.kernels import NAMES
from tests.accelz import forked
from tests.benchmarks.command import Benchmark

pytestmark = pytest.mark.slow  # starts programs

ROOT = Path(__file__).resolve().parents[2]
CALLS = (
    "info,bits,shared,conformance,kernels,captured,sanitizer,bandwidth,registered,several,hooks",
    "step,small,replayed,compiled,engine,offload,offload_3b,deepspeed,lengths,compile_time,float8,curves,largest",
)
"""The steps of two calls."""
MEASURED = ("hooks", "lengths", "compile_time", "largest")
HANGS = """
import time
def test_passes(): pass
def test_fails(): assert "this" == "that"
def test_hangs(): time.sleep(60)
"""
SLOW = """
import json, sys, time
with open(sys.argv[sys.argv.index("--json") + 1], "w") as file:
    json.dump({"rows": [{"way": "first"}]}, file)
time.sleep(60)
"""
OPTIONS = """
def pytest_addoption(parser):
    parser.addoption("--device")
    parser.addoption("--max-ranks")
"""


def device_check(*arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "scripts.device_check", *arguments]
    done = subprocess.run(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    """Of this interpreter's own packages, on the CPU."""
    (tmp_path / "scratch").mkdir()
    return Plan("cpu", tmp_path, tmp_path / "scratch", {**os.environ, **PYTEST}, quick=True, ranks=1)


@pytest.fixture
def in_a_step(monkeypatch: pytest.MonkeyPatch, plan: Plan) -> Callable[[Callable[[Plan], Outcome]], Outcome]:
    """The outcome of a step of one's own."""

    def run(step: Callable[[Plan], Outcome]) -> Outcome:
        monkeypatch.setitem(STEPS, "mine", step)
        return attempt("mine", plan)

    return run


@pytest.fixture
def forking(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `main` runs is forked with the imports done, but for the first command line."""
    fresh: list[Any] = [subprocess.Popen]

    def started(command: list[str], **options: Any) -> Any:
        start = fresh.pop() if fresh and "accelz.cli" in command else Benchmark
        return start(command, **options)

    forked.fork_from(planning, monkeypatch, started)
    monkeypatch.chdir(ROOT)


def test_every_step_runs_and_is_written_down(forking: None, tmp_path: Path) -> None:
    outs = [tmp_path / str(number) for number in range(len(CALLS))]
    for chosen, out in zip(CALLS, outs, strict=True):
        code = main(["cpu", "--quick", "--steps", chosen, "--out", str(out)])
        assert code == 0, (out / LOG).read_text()
        assert sorted(p.name for p in out.iterdir()) == ["device-check.json", LOG, "device-check.md"]
    whole = tmp_path / "whole"
    assert device_check("--join", *(str(o / "device-check.json") for o in outs), "--out", str(whole))[0] == 0

    result: dict[str, Any] = json.loads((whole / "device-check.json").read_text())
    steps = {step["name"]: step for step in result["steps"]}
    assert set(steps) == set(STEPS)
    assert all(step["ok"] for step in steps.values())
    assert steps["engine"]["detail"]["counts"]["passed"] >= 10
    assert {"adamw", "quantise", "copy"} <= {row["kernel"] for row in steps["bandwidth"]["detail"]}
    assert {"plain", "zero3"} <= {row["peer"] for row in steps["step"]["detail"]["rows"]}
    assert "zero3-host-params" in {row["peer"] for row in steps["offload"]["detail"]["rows"]}
    assert "zero3-streamed" in {row["peer"] for row in steps["offload_3b"]["detail"]["rows"]}
    assert {row["peer"] for row in steps["several"]["detail"]["rows"]} == {"zero3", "zero2"}
    measured = {name: step["detail"]["measured"] for name, step in steps.items() if name in MEASURED}
    assert {row["way"] for row in measured["compile_time"]} == {"plain", "zero3"}
    assert all(row["compiling"] > 0 for row in measured["compile_time"])
    assert [row["peer"] for row in measured["lengths"]] == ["zero3", "zero3, by use", "fsdp2"]
    assert measured["lengths"][1]["phases"]["backward"]["parameters"] > 0
    assert measured["largest"][0]["tokens_per_second"] > 0
    assert len(measured["hooks"]) == 3
    assert any(row["name"] == "shared_device" for row in steps["shared"]["detail"]["capabilities"])
    assert result["versions"]["torch"]
    table = (whole / "device-check.md").read_text()
    assert all(f"| {name} | ok |" in table for name in STEPS)


def test_a_device_that_is_not_there_fails(
    forking: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["nosuch", "--steps", "info,shared", "--out", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert said.count("FAILED") == 2
    assert "the rest runs on one rank" in said
    assert "nosuch" in (tmp_path / LOG).read_text()


def test_what_takes_too_long_is_killed_with_all_that_it_started(in_a_step: Any, tmp_path: Path) -> None:
    """A rank that a rank started would hold the device for the next step, and its time."""
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1], sys.argv[2]])"
    grandchild = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"

    def hangs(plan: Plan) -> Outcome:
        plan.run("hangs", 3.0, "-c", program, grandchild, str(tmp_path / "pid"))
        raise AssertionError

    outcome = in_a_step(hangs)
    assert (outcome.ok, outcome.summary) == (False, f"stopped after 3 s; see {LOG}")
    deadline = time.monotonic() + 5
    while _lives(int((tmp_path / "pid").read_text())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _lives(int((tmp_path / "pid").read_text()))


def _lives(pid: int) -> bool:
    """Whether a process runs; one that only waits to be reaped does not."""
    status = Path(f"/proc/{pid}/stat")
    try:
        return status.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_run_of_tests_that_is_stopped_has_said_what_it_did(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(HANGS)
    (tmp_path / "conftest.py").write_text(OPTIONS)
    (tmp_path / "pytest.ini").touch()
    deadline = time.monotonic() + 6
    outcome = attempt("engine", replace(plan, tests=(str(tmp_path),), only="test", deadline=deadline))
    assert not outcome.ok
    assert outcome.detail["counts"] == {"passed": 1, "failed": 1, "skipped": 0}
    assert "stopped after 6 s in test_some.py::test_hangs" in outcome.summary
    table = report.as_markdown(about("any"), [outcome])
    assert "test_fails`: E   AssertionError: assert 'this' == 'that'" in table


def test_when_no_time_is_left_nothing_more_is_begun(plan: Plan) -> None:
    outcome = attempt("bandwidth", replace(plan, deadline=time.monotonic()))
    assert (outcome.ok, outcome.summary) == (False, "not run: no time was left")


def test_a_mistake_of_ours_costs_one_step(in_a_step: Any, tmp_path: Path) -> None:
    def odd(plan: Plan) -> Outcome:
        raise KeyError("of_copy")

    outcome = in_a_step(odd)
    assert not outcome.ok
    assert "KeyError" in outcome.detail["traceback"]
    unprintable = Outcome("step", True, "", detail={"rows": [{}]})
    report.write(tmp_path, {"versions": {}}, [outcome, unprintable])
    first, _ = json.loads((tmp_path / "device-check.json").read_text())["steps"]
    assert 'File "scripts/device_check/steps.py"' in first["detail"]["traceback"]
    for text in (first["detail"]["traceback"], (tmp_path / "device-check.md").read_text()):
        assert absolute(text) == []
    assert "tables could not be made" in (tmp_path / "device-check.md").read_text()


@pytest.mark.parametrize("lost", ["norm_and_nonfinite", None])
def test_kernels_that_do_not_run_are_told(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, lost: str | None
) -> None:
    """So is an optimizer on the host without its library."""
    served = {name: "torch reference" if name == lost else "CudaKernels" for name in NAMES}

    def answer(self: Plan, name: str, limit: float, *arguments: str) -> subprocess.CompletedProcess[str]:
        on_host = {"adamw": "torch reference"}
        facts = {"kernels": served if "cuda" in arguments else on_host, "device_count": 1, "torch": "2.11"}
        return subprocess.CompletedProcess([], 0, json.dumps(facts))

    monkeypatch.setattr(Plan, "run", answer)
    outcome = attempt("info", replace(plan, device="cuda"))
    assert not outcome.ok
    assert ("are used instead of kernels: norm_and_nonfinite" in outcome.summary) is (lost is not None)
    assert "stepped by torch reference, not by the native library: pass one with --native" in outcome.summary


def about(hardware: str) -> dict[str, Any]:
    return {"backend": "cuda", "hardware": hardware, "versions": {}, "host_library": "", "date": ""}


def test_results_of_different_machines_are_not_joined(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        report.write(tmp_path / name, about(name), [])
    files = [str(tmp_path / name / "device-check.json") for name in ("one", "other")]
    code, said = device_check("--join", *files, "--out", str(tmp_path))
    assert code == 2
    assert "differ in hardware: other and one" in said


def test_parts_of_a_step_are_joined_and_what_was_repeated_is_replaced(tmp_path: Path) -> None:
    a, b = ("engine", "tests/a"), ("engine", "tests/b")
    runs = [[("shared", "")], [("shared", ""), a], [b], [a]]
    files = []
    for number, names in enumerate(runs):
        (tmp_path / str(number)).mkdir()
        outcomes = [Outcome(name, True, f"of run {number}", part=part) for name, part in names]
        report.write(tmp_path / str(number), about("one"), outcomes)
        files.append(tmp_path / str(number) / "device-check.json")
    _, joined = report.join(files)
    assert [(o.name, o.part, o.summary) for o in joined] == [
        ("shared", "", "of run 1"),
        ("engine", "tests/a", "of run 3"),
        ("engine", "tests/b", "of run 2"),
    ]
    assert "| engine | ok | of run 3; tests/a |" in report.as_markdown(about("one"), joined)


def test_an_unknown_step_is_refused() -> None:
    code, said = device_check("cpu", "--steps", "info,nosuch")
    assert code == 2
    assert "unknown: nosuch; the steps are info, kernels" in said


def wheel(folder: Path, name: str, content: str) -> Path:
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}.py", content)
    return folder


def test_the_tree_is_importable_without_an_installation(tmp_path: Path) -> None:
    """An interpreter that has none of our packages finds them, what a wheel brings, the native library."""
    environment = tree.assemble(tmp_path / "site", wheel(tmp_path / "wheels", "carried", "VALUE = 7\n"))
    library = tmp_path / "built.so"
    library.touch()
    package = tmp_path / "site" / tree.NATIVE
    assert native.provide(package, ROOT / tree.NATIVE, tmp_path / "build", library) == str(library)
    script = (
        "import carried, accelz_cpu, importlib.metadata as m\n"
        "print(carried.VALUE, sorted(e.name for e in m.entry_points(group='accelz.backends')))\n"
        "print(accelz_cpu.__path__)"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("7 ['cpu'")
    assert str([str(package)]) in done.stdout
    assert (package / native.LIBRARY).exists()


def test_a_wheel_of_our_own_is_refused(tmp_path: Path) -> None:
    wheels = wheel(tmp_path / "wheels", "accelz_zero", "")
    with pytest.raises(tree.WheelError, match=r"accelz_zero-1\.0.* is a package of the working tree"):
        tree.assemble(tmp_path / "site", wheels)
    wheels = wheel(tmp_path / "others", "Other", "")
    for _ in range(2):
        tree.assemble(tmp_path / "site", wheels)


@pytest.mark.parametrize(
    ("cmake", "reason"), [(None, "CMake is not on this machine"), ("/bin/false", "cmake -S failed")]
)
def test_why_there_is_no_native_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cmake: str | None, reason: str
) -> None:
    monkeypatch.setattr(native, "_installed", lambda: None)
    monkeypatch.setattr("shutil.which", lambda name: cmake)
    (tmp_path / "cmake").symlink_to("/bin/false")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert reason in native.provide(tmp_path, ROOT / tree.NATIVE, tmp_path / "build", None)
    assert not (tmp_path / native.LIBRARY).exists()


def test_a_benchmark_that_is_stopped_has_told_its_rows(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    found = replace(plan, environment={**plan.environment, "PYTHONPATH": str(tmp_path)})
    rows, ended = rows_of(found, "slow", 4.0, "slow")
    assert (rows, ended) == ([{"way": "first"}], "stopped after 4 s")


def test_targets_that_are_missed_are_told(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of peers that are there."""
    ratios = {"plain": (1.0, None), "zero3": (1.3, None), "zero2": (0.9, 0.7)}
    rows = [{"peer": peer, "median": 1.0, "to_plain": a, "to_fsdp2": b} for peer, (a, b) in ratios.items()]

    def ran(self: Plan, name: str, limit: float, *arguments: str) -> subprocess.CompletedProcess[str]:
        (self.scratch / f"{name}.json").write_text(json.dumps({"results": [{"rows": rows}]}))
        return subprocess.CompletedProcess([], 0, "")

    monkeypatch.setattr(Plan, "run", ran)
    targets = (Target("to_plain", 1.02), Target("to_fsdp2", 0.6))
    told = ["zero3: to_plain = 1.300, target 1.02", "zero2: to_fsdp2 = 0.700, target 0.6"]
    for quick, misses in ((False, told), (True, [])):
        assert compare(replace(plan, quick=quick), "mine", "", *targets, peers="").misses == misses


def test_rows_that_failed_are_told_by_what_they_tried() -> None:
    rows = [{"way": "plain", "compiling": 2.0}, {"way": "zero3", "error": "out of memory"}]
    found = from_rows("mine", rows, "stopped after 4 s", ["plain 2.0 s"], [])
    assert (found.ok, found.summary) == (False, "zero3 failed: out of memory; stopped after 4 s; plain 2.0 s")
    assert from_rows("mine", rows[:1], "", [], []).ok
    assert not from_rows("mine", [], "", [], []).ok


def test_a_step_in_graphs_of_the_device_has_a_comparison_of_its_own(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where that fails, what was compared without them is there, also in the table."""
    facts = {"capabilities": {"graph_capture": True}}
    row = {"median": 1.0, "to_plain": 1.0, "rank_bytes": None, "last_loss": 2.0, "loss_error": None}
    result = {"rows": [{"peer": "plain", **row}], "settings": {"launches": "one"}}

    def ran(self: Plan, name: str, limit: float, *arguments: str) -> subprocess.CompletedProcess[str]:
        if "zero3,zero3-captured" in arguments:
            return subprocess.CompletedProcess([], 1, "")
        (self.scratch / f"{name}.json").write_text(json.dumps({"results": [result]}))
        return subprocess.CompletedProcess([], 0, json.dumps(facts))

    monkeypatch.setattr(Plan, "run", ran)
    outcome = STEPS["small"](plan)
    assert (outcome.ok, outcome.summary) == (False, f"plain 1000.0 ms; captured: failed; see {LOG}")
    assert "| plain | 1 | 1 |" in report.as_markdown(
        {"backend": "", "hardware": "", "date": "", "versions": {}, "host_library": ""}, [outcome]
    )


def test_every_step_is_planned() -> None:
    assert {name for steps in PLANS.values() for name in steps.split(",")} == set(STEPS)


def test_copies_over_the_link_have_no_target() -> None:
    of_copy = {
        "copy": 1.0,
        "host to device": 0.02,
        "device to host": 0.02,
        "adamw": OF_COPY,
        "accumulate": 0.5,
    }
    rows = [{"kernel": kernel, "dtypes": "fp32", "of_copy": part} for kernel, part in of_copy.items()]
    (told,) = below_target(rows)
    assert told.startswith("accumulate fp32: 0.50 ")
