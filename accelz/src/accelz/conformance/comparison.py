"""What has changed between two reports of the kit on one backend."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from accelz.errors import AccelzError

MOST_SHOWN = 20


def read(path: Path, device: str) -> dict[str, Any]:
    """An earlier answer of `accelz check --json`. Raises AccelzError if `path` is none for this backend."""
    try:
        report = json.loads(path.read_text())
        lacking = {"device", "versions", "capabilities", "tests"} - set(report)
    except (OSError, ValueError, TypeError) as error:
        raise AccelzError(f"{path} is no report of `accelz check --json`: {error}") from error
    if lacking:
        raise AccelzError(
            f"{path} is no report of `accelz check --json`: it has no {', '.join(sorted(lacking))}"
        )
    if report["device"] != device:
        raise AccelzError(f"{path} is a report of {report['device']!r}, not of {device!r}")
    assert isinstance(report, dict)
    return report


def compare(old: dict[str, Any], new: dict[str, Any]) -> dict[str, list[str]]:
    """What is worse, what is better, and what else has changed, each a line for people.

    A test that did not run in both is told only where it failed in one.
    """
    before, after = old["tests"], new["tests"]
    worse = [f"{t}: was {before.get(t, 'not there')}" for t, o in after.items() if _newly(o, before.get(t))]
    fixed = [t for t, o in before.items() if o == "failed" and after.get(t) == "passed"]
    gone = [t for t, o in before.items() if o == "passed" and after.get(t) == "skipped"]
    states = {row["name"]: row["state"] for row in old["capabilities"]}
    moved = [
        f"{row['name']}: {states.get(row['name'], 'unknown')} → {row['state']}"
        for row in new["capabilities"]
        if row["state"] != states.get(row["name"])
    ]
    versions = [
        f"{name}: {old['versions'].get(name, 'unknown')} → {version}"
        for name, version in new["versions"].items()
        if version != old["versions"].get(name)
    ]
    return {
        "worse": worse + [f"{t}: passed before, is skipped now" for t in gone],
        "better": [f"{t}: failed before" for t in fixed],
        "changed": versions + moved,
    }


def lines(difference: dict[str, list[str]]) -> list[str]:
    """The difference for people: "worse: …", at most MOST_SHOWN of a kind."""
    told = []
    for kind, entries in difference.items():
        told += [f"{kind}: {entry}" for entry in entries[:MOST_SHOWN]]
        told += [f"{kind}: {len(entries) - MOST_SHOWN} more"] if len(entries) > MOST_SHOWN else []
    return told or ["nothing has changed"]


def _newly(outcome: str, before: str | None) -> bool:
    return outcome == "failed" and before != "failed"
