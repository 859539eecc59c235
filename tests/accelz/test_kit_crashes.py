"""The kit goes on where a backend hangs or crashes, and says which method did it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from accelz.conformance import runner
from accelz.errors import AccelzError

from .fake_distribution import good, install
from .forked import answered
from .liars.told import LIAR

pytestmark = pytest.mark.slow  # starts programs


def test_a_method_that_hangs_is_named_and_the_rest_is_tested(tmp_path: Path) -> None:
    install(tmp_path, "liar", LIAR.format(call="hanging()"))
    code, summary = answered(tmp_path, "--timeout", "6", "-k", "the_interface_holds or TestRng")
    assert code == 1
    assert [f["broken"] for f in summary["failures"]] == ["Event.synchronize"]
    came = "it was still running after 6 s"
    do = "correct Event.synchronize: `python -m pydoc accelz.Event` says what it has to do"
    said = f"Event.synchronize: must return\n  got:  {came}\n  do:   {do}"
    assert summary["failures"][0]["message"] == said
    assert summary["passed"] == 4


def test_a_hang_that_nothing_interrupts_ends_the_run(tmp_path: Path) -> None:
    hang = (
        "    import ctypes\n    mutex, library = ctypes.create_string_buffer(64), ctypes.PyDLL(None)\n"
        "    def seed(seed):\n        while True: library.pthread_mutex_lock(mutex)\n"
        "    accelerator.rng.seed = seed\n"
    )
    source = good("liar").replace("    return accelerator", f"{hang}    return accelerator")
    install(tmp_path, "liar", source)
    code, summary = answered(tmp_path, "--timeout", "3", "-k", "a_seed_repeats")
    assert code == 1
    failure = summary["failures"][-1]
    assert failure["broken"] == "Rng.seed"
    assert "was aborted because it produced no output for too long" in failure["message"]
    assert " in seed\n" in failure["detail"]  # the stack


CRASH = """    import ctypes
    def seed(seed):
        if seed == 8:  # in one of the tests
            ctypes.string_at(0)
        type(accelerator.rng).seed(accelerator.rng, seed)
    accelerator.rng.seed = seed
"""


def test_a_crash_of_the_device_is_a_failure_of_its_test_and_the_rest_is_tested(tmp_path: Path) -> None:
    source = good("liar").replace("    return accelerator", f"{CRASH}    return accelerator")
    install(tmp_path, "liar", source)
    began = time.monotonic()
    code, summary = answered(tmp_path, "-k", "TestRng or capabilities_are_declared")
    assert code == 1
    [failure] = summary["failures"]
    assert failure["broken"] == "Rng.seed"
    assert "test_a_seed_repeats" in failure["test"]
    came = "the process ended by signal 11 (SIGSEGV) in test_a_seed_repeats_and_seeds_differ, at "
    assert failure["message"].startswith(f"Rng.seed: must not end the process\n  got:  {came}"), failure[
        "message"
    ]
    assert "ctypes/__init__.py" in failure["message"]
    assert "\n  do:   correct Rng.seed: " in failure["message"]
    assert " in seed\n" in failure["detail"]  # the stack
    assert (summary["passed"], summary["failed"], summary["not_run"]) == (4, 1, 0)
    assert summary["capabilities"]
    assert 0 < summary["seconds"] <= time.monotonic() - began + 0.01  # rounded


def test_what_is_left_after_too_many_crashes_is_counted(tmp_path: Path) -> None:
    report, notes = tmp_path / "report.jsonl", tmp_path / "notes"
    events = [{"event": "collected", "count": 5}, {"event": "start", "test": "x::test_one"}]
    report.write_text("".join(f"{json.dumps(event)}\n" for event in events))
    ended = runner.Ended(-6, "", silent=False)
    assert runner.note_crash(report, notes, ended)
    summary = runner.summary("liar", report, notes, ended)
    assert (summary["passed"], summary["failed"], summary["not_run"], summary["ok"]) == (0, 1, 4, False)
    assert "ended by signal 6 (SIGABRT) in test_one" in summary["failures"][0]["message"]


def test_a_process_that_crashes_when_all_is_done_does_not_pass(tmp_path: Path) -> None:
    report, notes = tmp_path / "report.jsonl", tmp_path / "notes"
    events: list[dict[str, Any]] = [
        {"event": "result", "test": "x::test_one", "outcome": "passed"},
        {"event": "summary", "passed": 1, "failed": 0, "failures": []},
    ]
    report.write_text("".join(f"{json.dumps(event)}\n" for event in events))
    ended = runner.Ended(-11, "", silent=False)
    assert not runner.note_crash(report, notes, ended)
    summary = runner.summary("liar", report, notes, ended)
    assert (summary["failed"], summary["ok"]) == (1, False)
    assert "ended by signal 11 (SIGSEGV) in no test" in summary["failures"][0]["message"]


def test_a_kit_that_cannot_start_says_why(tmp_path: Path) -> None:
    ended = runner.Ended(1, "ModuleNotFoundError: No module named 'py'", silent=False)
    with pytest.raises(AccelzError, match="the kit did not run: ModuleNotFoundError: No module named 'py'"):
        runner.summary("foo", tmp_path / "report", tmp_path / "notes", ended)
