"""The result as JSON and Markdown: device, versions, date, what held, what it measured."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from scripts.device_check.steps import Outcome

LIBRARIES = ("torch", "triton", "nvidia-nccl-cu13", "nvidia-cuda-nvrtc", "cuda-core", "cuda-bindings")


def context(device: str, hardware: str) -> dict[str, Any]:
    """Where and when. hardware: the device's own name."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "backend": device,
        "hardware": hardware,
        "versions": {"python": platform.python_version(), **_versions()},
    }


def as_json(about: dict[str, Any], outcomes: Sequence[Outcome]) -> str:
    return json.dumps({**about, "steps": [o.plain() for o in outcomes]}, indent=1) + "\n"


def as_markdown(about: dict[str, Any], outcomes: Sequence[Outcome]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    lines = [f"# Device check: {about['backend']} on {about['hardware']}", "", f"{about['date']}; {versions}"]
    lines += ["", "| step | result | | seconds |", "| --- | --- | --- | ---: |"]
    for o in outcomes:
        state = "failed" if not o.ok else f"{len(o.misses)} below target" if o.misses else "ok"
        lines.append(f"| {o.name} | {state} | {o.summary} | {o.seconds} |")
    for o in outcomes:
        lines += _details(o)
    return "\n".join(lines) + "\n"


def _details(outcome: Outcome) -> list[str]:
    lines = [f"- {miss}" for miss in outcome.misses]
    if outcome.name == "bandwidth" and outcome.detail:
        lines += _table(
            outcome.detail, ("kernel", "dtypes", "origin", "bytes_per_second", "of_copy", "launch")
        )
    if outcome.name in ("step", "offload") and outcome.detail:
        ratio = "to_plain" if outcome.name == "step" else "to_fsdp2-host"
        keys = ("peer", "median", ratio, "rank_bytes", "last_loss", "loss_error")
        lines += _table(outcome.detail["rows"], keys)
    if outcome.name in ("conformance", "engine") and outcome.detail:
        lines += [_failure(f) for f in outcome.detail["failures"]]
    return ["", f"## {outcome.name}", "", *lines] if lines else []


def _table(rows: Sequence[dict[str, Any]], keys: Sequence[str]) -> list[str]:
    head = [f"| {' | '.join(keys)} |", f"|{' --- |' * len(keys)}"]
    return ["", *head, *(f"| {' | '.join(_cell(row[k]) for k in keys)} |" for row in rows)]


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


def _failure(failure: dict[str, Any]) -> str:
    lines = [
        line.strip() for line in (failure.get("message") or failure["text"]).splitlines() if line.strip()
    ]
    said = lines[0 if failure.get("message") else -1] if lines else ""
    return f"- `{failure['test']}`: {said[:300]}"


def _versions() -> dict[str, str]:
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
