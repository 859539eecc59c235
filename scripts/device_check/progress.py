"""A log of tests, line by line as they run, so that a run that is stopped leaves what it did until then.

This is a pytest plugin (`-p scripts.device_check.progress --test-log FILE`), and what reads the file. The
conformance kit's own report has the same lines.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.paths import relative

KEPT = 1500
"""Characters that are kept of the end of a failure's text."""


def pytest_addoption(parser: Any) -> None:
    parser.addoption(
        "--test-log", type=Path, required=True, help="a JSON object for each test's start and end"
    )


def pytest_configure(config: Any) -> None:
    if not hasattr(config, "workerinput"):  # one of xdist's workers, which report to the process that writes
        config.pluginmanager.register(_Writer(config.getoption("test_log")))


class _Writer:
    """Writes a line when a test starts, one when it ends, and another if it fails after that."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(event="start", test=nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or not report.passed:
            self._result(report)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._result(report)

    def _result(self, report: Any) -> None:
        text = relative(report.longreprtext) if report.failed else ""  # whole paths, before it is cut
        self._write(event="result", test=report.nodeid, outcome=report.outcome, detail=text[-KEPT:])

    def _write(self, **event: str) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")


@dataclass(frozen=True)
class Progress:
    """What a test log says.

    counts: of tests passed, failed and skipped. failures: the test and the text of each. unfinished: tests
    that were running at the end of the file. summary: the conformance kit's own, or None.
    """

    counts: dict[str, int]
    failures: list[dict[str, str]]
    unfinished: list[str]
    summary: dict[str, Any] | None

    def said(self) -> str:
        return ", ".join(f"{n} {outcome}" for outcome, n in self.counts.items())


def read(path: Path) -> Progress:
    """Read what has been written so far; nothing if there is no file."""
    events = [_event(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    results: dict[str, dict[str, Any]] = {}
    running: dict[str, None] = {}
    summary = None
    for event in events:
        if event["event"] == "start":
            running[event["test"]] = None
        elif event["event"] == "result":
            results[event["test"]] = event
            running.pop(event["test"], None)
        elif event["event"] == "summary":
            summary = event
    outcomes = [result["outcome"] for result in results.values()]
    counts = {outcome: outcomes.count(outcome) for outcome in ("passed", "failed", "skipped")}
    failures = [
        {"test": test, "text": str(result.get("message") or result.get("detail") or "")[-KEPT:]}
        for test, result in results.items()
        if result["outcome"] == "failed"
    ]
    return Progress(counts, failures, list(running), summary)


def _event(line: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(line)
    except ValueError:  # the cut last line of a process that was killed
        return {"event": "broken"}
    return found
