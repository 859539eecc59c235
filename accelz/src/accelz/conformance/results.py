"""The kit's results: how each test ended, and what that says of the backend. Plain types, without torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

NOT_TRIED = "not tried"
BETWEEN_RANKS = "collectives between ranks"
TIERS = ("core", "training")
"""Of operators: what an engine computes with, and what models and their loops do."""

ORDER = (
    "accelz_backend", "BackendDescriptor", "Accelerator", "Capabilities", "torch", "Event", "Stream",
    "Streams", "Memory", "Rng", "FlatBufferStrategy", "FlatBuffer", "Collectives", "Group", "Handle",
    "Kernels", "Graph",
)  # fmt: skip
"""The best order in which to write a backend: the tests of each entry rely on the entries before it."""


FIX = "correct its kernel; without one, torch takes the operator apart or a host fallback runs it"
"""What to do about an operator that is wrong."""


def advised(message: str, method: str) -> str:
    """A failure's message, with what to do about `method`, which broke its contract, unless it says so."""
    if "\n  do:   " in message:
        return message
    owner = method.partition(".")[0]
    documented = owner if owner in ORDER[1:] else "hooks"
    usual = f"correct {method or 'the backend'}: `python -m pydoc accelz.{documented}` says what it has to do"
    return f"{message}\n  do:   {FIX if owner == 'torch' else usual}"


def rank_in_order(method: str) -> int:
    """The position of a method in ORDER; methods that are not in it come last."""
    owner = method.partition(".")[0]
    return ORDER.index(owner) if owner in ORDER else len(ORDER)


@dataclass(frozen=True)
class Verdict:
    """How one test ended.

    outcome: "passed", "failed" or "skipped". methods and contract: what it is about, from its marks and its
    docstring. parameters: its case, by the names of pytest's parameters. proves and needs: capabilities.
    undeclared: one that works although it is not declared. tier: of the operators it tests, or "". ranks: how
    many it has, or 0. reason: why it was skipped.

    For a failure, broken is the method whose contract broke, message is what was expected and what came (the
    same for all tests that fail for one reason), and detail is the whole report.
    """

    test: str
    outcome: str
    methods: Sequence[str] = ()
    contract: str = ""
    broken: str = ""
    message: str = ""
    detail: str = ""
    proves: Sequence[str] = ()
    needs: Sequence[str] = ()
    undeclared: str | None = None
    tier: str = ""
    parameters: Mapping[str, str] = field(default_factory=dict)
    ranks: int = 0
    reason: str = ""


@dataclass(frozen=True)
class Setting:
    """What is known before the first test. versions: of software, driver and machine. declared: whether each
    capability is, by name; empty if the backend does not load. unwritten: what its package has to write.
    count: of the tests that were chosen."""

    versions: Mapping[str, str] = field(default_factory=dict)
    declared: Mapping[str, bool] = field(default_factory=dict)
    unwritten: Sequence[str] = ()
    count: int = 0


def summary(device: str, setting: Setting, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Counts, capability rows, failures and what was not tried, also of a run that was cut off."""
    outcomes = Counter(v.outcome for v in verdicts)
    ranks = max((v.ranks for v in verdicts if v.outcome != "skipped"), default=0)
    rows = [
        {"name": name, "declared": declared, "state": _state(name, declared, verdicts)}
        for name, declared in setting.declared.items()
    ]
    failed = (v for v in verdicts if v.outcome == "failed")
    return {
        "device": device,
        "versions": dict(setting.versions),
        "passed": outcomes["passed"],
        "failed": outcomes["failed"],
        "skipped": outcomes["skipped"],
        "not_run": max(0, setting.count - len(verdicts)),
        "ranks_tested": ranks,
        "not_tried": _not_tried(rows, ranks, verdicts),
        "unwritten": list(setting.unwritten),
        "operators": {tier: _counts(v for v in verdicts if v.tier == tier) for tier in TIERS},
        "capabilities": rows,
        "failures": [asdict(v) for v in sorted(failed, key=lambda v: rank_in_order(v.broken))],
        "tests": {short(v.test): v.outcome for v in verdicts},
    }


def short(test: str) -> str:
    """A test's identifier without the folder that the kit is in."""
    file, _, name = test.partition("::")
    return f"{file.rpartition('/')[2]}::{name}" if name else file


def _counts(verdicts: Iterable[Verdict]) -> dict[str, int]:
    outcomes = Counter(v.outcome for v in verdicts)
    return {outcome: outcomes[outcome] for outcome in ("passed", "failed")}


def _state(name: str, declared: bool, verdicts: Sequence[Verdict]) -> str:
    if any(v.undeclared == name for v in verdicts):
        return "works undeclared"
    if not declared:
        return "not declared"
    if any(v.outcome == "failed" and name in (*v.proves, *v.needs) for v in verdicts):
        return "failed"
    if any(v.outcome == "passed" and name in v.proves for v in verdicts):
        return "proved"
    return NOT_TRIED


def _not_tried(rows: list[dict[str, Any]], ranks: int, verdicts: Sequence[Verdict]) -> list[dict[str, str]]:
    """What should have been tested and was not, and what it needs."""
    names = [row["name"] for row in rows if row["state"] == NOT_TRIED]
    found = {name: [v for v in verdicts if name in v.proves] for name in names}
    if ranks < 2:
        found = {BETWEEN_RANKS: [v for v in verdicts if v.ranks == 2], **found}
    left_out = "its tests, which were left out"
    return [
        {"what": what, "needs": next((v.reason for v in tests if v.reason), left_out)}
        for what, tests in found.items()
    ]
