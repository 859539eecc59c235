"""The result as JSON and Markdown: device, versions, date, what passed and what was measured.

Paths in it are relative to the project; the log has them as they were.
"""

from __future__ import annotations

import json
import platform
import traceback
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from scripts.device_check.outcome import Outcome
from scripts.paths import all_relative, relative

LIBRARIES = (
    "torch", "triton", "nvidia-nccl-cu13", "nvidia-cuda-nvrtc", "cuda-bindings",
)  # fmt: skip
NAME = "device-check"
RATIOS = {
    "offload": "to_fsdp2-host",
    "offload_3b": "to_fsdp2-host",
    "deepspeed": "to_deepspeed3-host",
    "small, captured": "to_zero3",
    "compiled": "to_fsdp2",
    "compiled, captured": "to_eager",
    "float8": "to_one_ahead",
    "several": "to_fsdp2",
}
"""Of steps that compare peers, the ratio that is shown."""


class JoinError(Exception):
    """Results do not belong together, for the reason that the message gives."""


def context(device: str, hardware: str, host_library: str) -> dict[str, Any]:
    """Where and when the run is. hardware: the device's own name. host_library: origin of accelz_cpu's."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "backend": device,
        "hardware": hardware,
        "versions": {"python": platform.python_version(), **_versions()},
        "host_library": host_library,
    }


def write(folder: Path, about: dict[str, Any], outcomes: Sequence[Outcome]) -> None:
    """Write both files with the outcomes so far. If a table cannot be made, no result is lost."""
    plain = all_relative({**about, "steps": [o.plain() for o in outcomes]})
    (folder / f"{NAME}.json").write_text(json.dumps(plain, indent=1, default=str) + "\n", encoding="utf-8")
    try:
        text = as_markdown(about, outcomes)
    except Exception:
        text = f"# Device check\n\nThe tables could not be made; `{NAME}.json` has all results.\n\n"
        text += f"```\n{traceback.format_exc()}```\n"
    (folder / f"{NAME}.md").write_text(relative(text), encoding="utf-8")


def join(files: Sequence[Path]) -> tuple[dict[str, Any], list[Outcome]]:
    """Join the outcomes of several runs on one kind of machine.

    If files have the same part of a step, the later file's counts. Raises JoinError if device or versions
    differ.
    """
    runs = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    outcomes: dict[tuple[str, str], Outcome] = {}
    for file, run in zip(files, runs, strict=True):
        for key in ("backend", "hardware", "versions"):
            if run[key] != runs[0][key]:
                raise JoinError(f"{file} and {files[0]} differ in {key}: {run[key]} and {runs[0][key]}")
        outcomes |= {(step["name"], step["part"]): Outcome(**step) for step in run["steps"]}
    about = {key: value for key, value in runs[-1].items() if key != "steps"}
    return about, list(outcomes.values())


def as_markdown(about: dict[str, Any], outcomes: Sequence[Outcome]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    lines = [f"# Device check: {about['backend']} on {about['hardware']}", "", f"{about['date']}; {versions}"]
    lines += ["", f"Library of the host's kernels: {about['host_library']}"]
    lines += ["", "| step | result | | seconds |", "| --- | --- | --- | ---: |"]
    for o in outcomes:
        state = "failed" if not o.ok else f"{len(o.misses)} below target" if o.misses else "ok"
        summary = "; ".join(filter(None, (o.summary, o.part)))
        lines.append(f"| {o.name} | {state} | {_in_cell(summary)} | {o.seconds} |")
    for o in outcomes:
        lines += _details(o)
    return "\n".join(lines) + "\n"


def _details(outcome: Outcome) -> list[str]:
    lines = [f"- {miss}" for miss in outcome.misses]
    detail = outcome.detail or {}
    if isinstance(detail, list):
        lines += _table(detail, ("kernel", "dtypes", "origin", "bytes_per_second", "of_copy", "launch"))
    elif "bits" in detail:
        lines += _table(
            detail["bits"], ("ranks", "variant", "mode", "repeats", "alike", "agrees", "last_loss")
        )
    elif "traceback" in detail:
        lines += ["```", detail["traceback"], "```"]
    elif "measured" in detail:
        for row in detail["measured"]:
            lines += [
                f"- {', '.join(f'{key}: {_cell(value)}' for key, value in row.items() if _short(value))}"
            ]
    elif "failures" in detail:
        lines += [_failure(f) for f in detail["failures"]]
    else:
        lines += _comparisons(outcome.name, detail)
    return ["", f"## {outcome.name}", "", *lines] if lines else []


def _comparisons(step: str, detail: dict[str, Any], what: str = "") -> list[str]:
    """The tables of a step that compares peers. what: in which a further one differs from the first."""
    lines = []
    if "rows" in detail:
        ratio = RATIOS.get(f"{step}, {what}", RATIOS.get(step, "to_plain"))
        keys = ("peer", "median", ratio, "rank_bytes", "last_loss", "loss_error")
        about = "; ".join(filter(None, (what, f"launches: {detail['settings']['launches']}")))
        lines += ["", f"{about[0].upper()}{about[1:]}.", *_table(detail["rows"], keys)]
    for other, more in detail.items():
        lines += _comparisons(step, more, other) if isinstance(more, dict) and "rows" in more else []
    return lines


def _short(value: Any) -> bool:
    return not isinstance(value, (list, dict))


def _table(rows: Sequence[dict[str, Any]], keys: Sequence[str]) -> list[str]:
    head = [f"| {' | '.join(keys)} |", f"|{' --- |' * len(keys)}"]
    return ["", *head, *(f"| {' | '.join(_cell(row[k]) for k in keys)} |" for row in rows)]


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else _in_cell(str(value))


def _in_cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _failure(failure: dict[str, str]) -> str:
    """The line that says what is wrong: the first line of pytest's error, or of the kit's message."""
    lines = [line.strip() for line in failure["text"].splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("E ")]
    said = errors[0] if errors else lines[0] if lines else ""
    return f"- `{failure['test']}`: {said[:300]}"


def _versions() -> dict[str, str]:
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
