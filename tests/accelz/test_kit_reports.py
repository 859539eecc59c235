"""Reports of the kit: what they are about, how far a run has come, what has changed since an earlier one."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from accelz import AccelzError
from accelz.conformance import comparison, progress, results
from accelz.conformance.operators import operator
from accelz.conformance.results import Setting, Verdict
from accelz.conformance.runner import supervise

from .fake_distribution import environment, good, install
from .forked import answered

VERDICTS = [
    Verdict("a/test_x.py::TestX::test_one", "passed", proves=("streams",), ranks=2),
    Verdict("a/test_x.py::TestX::test_two", "failed", broken="Rng.seed", message="Rng.seed: must"),
    Verdict("a/test_x.py::TestX::test_three", "failed", broken="torch.add", tier="core"),
    Verdict("a/test_x.py::TestX::test_four", "skipped", proves=("lazy_graph",), reason="nothing lazy"),
]
SETTING = Setting({"torch": "2.13"}, {"streams": True, "lazy_graph": True, "exact_memory": False}, (), 6)


def test_a_run_that_was_cut_off_is_summarised_as_far_as_it_came() -> None:
    summary = results.summary("foo", SETTING, VERDICTS)
    assert (summary["passed"], summary["failed"], summary["not_run"]) == (1, 2, 2)
    assert [f["broken"] for f in summary["failures"]] == ["torch.add", "Rng.seed"]
    states = {row["name"]: row["state"] for row in summary["capabilities"]}
    assert states == {"streams": "proved", "lazy_graph": "not tried", "exact_memory": "not declared"}
    assert summary["not_tried"] == [{"what": "lazy_graph", "needs": "nothing lazy"}]
    assert summary["operators"]["core"] == {"passed": 0, "failed": 1}
    assert summary["tests"]["test_x.py::TestX::test_two"] == "failed"


def test_what_is_worse_and_what_is_better_is_told() -> None:
    old = results.summary("foo", SETTING, VERDICTS)
    later = [
        Verdict("elsewhere/test_x.py::TestX::test_one", "failed"),
        Verdict("elsewhere/test_x.py::TestX::test_two", "passed"),
        Verdict("elsewhere/test_x.py::TestX::test_three", "failed"),
    ]
    new = results.summary("foo", Setting({"torch": "2.14"}, SETTING.declared, (), 3), later)
    assert comparison.lines(comparison.compare(old, new)) == [
        "worse: test_x.py::TestX::test_one: was passed",
        "better: test_x.py::TestX::test_two: failed before",
        "changed: torch: 2.13 → 2.14",
        "changed: streams: proved → not tried",
    ]
    assert comparison.lines(comparison.compare(old, old)) == ["nothing has changed"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is no report"),
        ("[]", "is no report"),
        ('{"device": "foo"}', "has no capabilities, tests, versions"),
        ("{}", "has no capabilities, device, tests, versions"),
        (
            '{"device": "bar", "versions": {}, "capabilities": [], "tests": {}}',
            "is a report of 'bar', not of",
        ),
    ],
)
def test_a_file_that_is_no_report_of_this_backend(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "old.json"
    path.write_text(text)
    with pytest.raises(AccelzError, match=said):
        comparison.read(path, "foo")


def test_an_operator_that_hangs_or_crashes_is_known_by_its_name() -> None:
    with operator("torch.add", "must run"):
        assert progress.now() == "torch.add"
    assert progress.now() == ""


@pytest.mark.slow
def test_a_report_says_what_it_is_about_and_is_compared(tmp_path: Path) -> None:
    install(tmp_path, "liar", good("liar"))
    code, first = answered(tmp_path, "--quick", "-k", "TestRng or TestLeaks")
    assert code == 0
    assert {name.partition("::")[0] for name in first["tests"]} == {"test_rng.py"}
    assert set(first["versions"]) >= {"torch", "accelz", "backend", "driver and devices", "machine"}
    assert first["versions"]["backend"] == "accelz-liar 1.0"
    assert first["versions"]["driver and devices"] == "a double of the cpu"
    first["tests"] = dict.fromkeys(first["tests"], "failed")
    old = tmp_path / "old.json"
    old.write_text(json.dumps(first))
    code, second = answered(tmp_path, "-k", "TestRng", "--against", str(old))
    assert code == 0
    assert second["against"]["worse"] == []
    assert len(second["against"]["better"]) == 4
    gone = "test_streams.py::TestStreams::test_current_is_the_stream_in_use"
    old.write_text(json.dumps({**first, "tests": {gone: "passed"}}))
    code, third = answered(tmp_path, "-k", "test_current_is_the_stream", "--against", str(old))
    assert (code, third["ok"], third["failed"]) == (1, False, 0)
    assert third["against"]["worse"] == [f"{gone}: passed before, is skipped now"]


class Interrupted(type(Path())):  # type: ignore[misc]
    """A report that is looked at as Ctrl-C comes."""

    def exists(self, **_: Any) -> bool:
        raise KeyboardInterrupt


def test_ctrl_c_ends_the_kit_whenever_it_comes(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(100)"]
    with subprocess.Popen(command, text=True) as process:
        ended = supervise(process, Interrupted(tmp_path), 60)
        assert ended.interrupted
        assert process.returncode == -signal.SIGKILL


SLOW = """    import os, pathlib, time
    def seed(seed):
        pathlib.Path(os.environ["REACHED"]).touch()
        time.sleep(100)
    accelerator.rng.seed = seed
"""


@pytest.mark.slow
def test_a_run_that_is_killed_reports_what_has_run(tmp_path: Path) -> None:
    source, reached = (
        good("liar").replace("    return accelerator", f"{SLOW}    return accelerator"),
        tmp_path / "at",
    )
    install(tmp_path, "liar", source)
    tests = "load_gives_every_role or a_seed_repeats"
    command = [sys.executable, "-m", "accelz.cli", "check", "liar", "--json", "-k", tests]
    variables = environment(tmp_path, REACHED=str(reached))
    with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 100
        while not reached.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        answer: dict[str, Any] = json.loads(process.communicate(timeout=60)[0])
    assert process.returncode == 1
    assert (answer["interrupted"], answer["ok"]) == (True, False)
    assert (answer["passed"], answer["failed"], answer["not_run"]) == (1, 0, 1)
    assert answer["capabilities"]
