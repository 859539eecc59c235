"""The kit's results: one row per capability, and each failure by the method whose contract broke."""

from __future__ import annotations

import json
from collections.abc import Generator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from accelz import selection
from accelz.conformance import results, versions
from accelz.conformance.cluster import ClusterError
from accelz.conformance.contract import ContractBroken, missing_operator
from accelz.conformance.fixtures import UNDECLARED, number_of_ranks
from accelz.conformance.marks import declares, every_capability, names, not_to_declare, subjects
from accelz.conformance.results import Setting, Verdict
from accelz.conformance.stubs import unwritten
from accelz.discovery import installed
from accelz.errors import AccelzError

PLAIN = (str, int, float, tuple, torch.dtype)
REGISTER = (
    "register a kernel for it, or one host fallback for all operators (csrc/fallback.cpp of accelz-sim)"
)
RESIZE_HOOK = "implement `resizePrivateUse1Bytes`"
NO_RESIZE = (
    "Capabilities.storage_resize: untyped_storage().resize_ must work\n"
    "  got:  NotImplementedError, since the device's hooks have no resizePrivateUse1Bytes\n"
    "  do:   implement that hook, or declare storage_resize=False; flat buffers are then accelz.CopyAndKeep"
)


class Reporter:
    """Collects results, prints the table, and writes the machine-readable file."""

    def __init__(self, device: str, target: Path | None) -> None:
        self._device = device
        self._target = target
        self._results = {} if target is None else _earlier(target)
        self._setting = Setting()

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave out the tests that another process has run before it crashed."""
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in self._results])
        items[:] = [item for item in items if item.nodeid not in self._results]

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._setting = Setting(
            versions.versions(self._device),
            _declared(self._device),
            unwritten(_package(self._device)),
            len(session.items) + len(self._results),
        )
        self._write({"event": "collected", **asdict(self._setting)})

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write({"event": "start", "test": nodeid})

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, Any, Any]:
        report = yield
        finding = ("", "")
        if report.failed and call.excinfo is not None:
            broken, message = _finding(item, call.excinfo.value, report.longreprtext)
            finding = (broken, results.advised(message, broken))
            report.longrepr = f"{', '.join(names(item, 'accelz_about'))}: {_contract(item)}\n{finding[1]}"
        if report.failed or report.skipped or report.when == "call":
            result = _result(item, report, finding)
            self._results[item.nodeid] = result
            self._write({"event": "result", **asdict(result)})
        return report

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:  # a test module that cannot be imported is a failure, not an empty run
            text = report.longreprtext
            verdict = Verdict(
                report.nodeid, "failed", contract="the kit can be imported", message=text, detail=text
            )
            self._results[report.nodeid] = verdict
            self._write({"event": "result", **asdict(verdict)})

    def pytest_sessionfinish(self) -> None:
        self._write({"event": "summary", **self.summary()})

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self._target:
            return  # the reader of the file prints the table
        summary = self.summary()
        terminalreporter.section(f"accelz conformance: {self._device}")
        for name, version in summary["versions"].items():
            terminalreporter.line(f"{name:<24} {version}")
        for row in summary["capabilities"]:
            declared = "declared" if row["declared"] else ""
            terminalreporter.line(f"{row['name']:<24} {declared:<10} {row['state']}")
        for untested in summary["not_tried"]:
            terminalreporter.line(f"NOT TESTED: {untested['what']}; needs {untested['needs']}")

    def summary(self) -> dict[str, Any]:
        """What `results.summary` says of the tests that have run."""
        return results.summary(self._device, self._setting, list(self._results.values()))

    def _write(self, event: dict[str, Any]) -> None:
        if self._target:
            with self._target.open("a") as file:
                file.write(json.dumps(event) + "\n")


def _declared(device: str) -> dict[str, bool]:
    """Whether each capability is declared; nothing if the backend does not load, as every test reports."""
    try:
        capabilities = selection.use(device).capabilities
        return {name: declares(capabilities, name) for name in every_capability(capabilities)}
    except (AccelzError, AttributeError, ValueError):
        return {}


def _package(device: str) -> str:
    return next((entry.value.partition(":")[0].partition(".")[0] for entry in installed(device)), "")


def _earlier(target: Path) -> dict[str, Verdict]:
    """The results that another process has left in the file."""
    lines = target.read_text().splitlines() if target.exists() else []
    events = [event for event in map(json.loads, lines) if event.pop("event") == "result"]
    return {event["test"]: Verdict(**event) for event in events}


def _finding(item: pytest.Item, error: BaseException, text: str) -> tuple[str, str]:
    """Return the method to blame for a test's error, and the message. text: pytest's own report of it."""
    if RESIZE_HOOK in str(error):  # whatever first needed it
        return "Capabilities.storage_resize", NO_RESIZE
    if isinstance(error, (ContractBroken, ClusterError)) and error.method:
        return error.method, _with_advice(str(error), item)
    if missing := missing_operator(error):
        operator = f"torch.{missing}"
        return operator, f"{operator}: not implemented yet on this device\n  do:   {REGISTER}"
    about = names(item, "accelz_about")
    return (about[0] if about else ""), text


def _with_advice(message: str, item: pytest.Item) -> str:
    """Add what to declare instead, where the test is about a declared capability and says nothing better."""
    flags = [name for name in subjects(item) if not name.startswith("dtype")]
    instead = next(filter(None, map(not_to_declare, (*names(item, "accelz_proves"), *flags))), "")
    return (
        f"{message}\n  do:   make it so, or {instead}" if instead and "\n  do:   " not in message else message
    )


def _result(item: pytest.Item, report: Any, finding: tuple[str, str]) -> Verdict:
    return Verdict(
        test=item.nodeid,
        outcome=report.outcome,
        methods=names(item, "accelz_about"),
        contract=_contract(item),
        broken=finding[0],
        message=finding[1],
        detail=report.longreprtext if report.failed else "",
        proves=names(item, "accelz_proves"),
        needs=subjects(item),
        undeclared=item.stash.get(UNDECLARED, None),
        parameters=_parameters(item),
        tier=next(iter(names(item, "accelz_tier")), ""),
        ranks=number_of_ranks(item),
        reason=report.longrepr[2].removeprefix("Skipped: ") if report.skipped else "",
    )


def _parameters(item: pytest.Item) -> dict[str, str]:
    callspec = getattr(item, "callspec", None)
    if callspec is None:
        return {}
    if not all(isinstance(value, PLAIN) for value in callspec.params.values()):
        return {"case": callspec.id}
    return {k: str(v).removeprefix("torch.") for k, v in callspec.params.items()}


def _contract(item: pytest.Item) -> str:
    function = getattr(item, "function", None)
    doc = getattr(function, "__doc__", None) or item.name
    return " ".join(doc.split())
