"""What steps are made of: the kit, tests of the working tree, benchmarks, and what they have written."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from scripts.device_check import progress
from scripts.device_check.outcome import Outcome
from scripts.device_check.plan import LOG, Plan

LONGEST = 560.0
"""The limit, in seconds, of a step that may take minutes."""
REGISTERED = {"cuda": "ACCELZ_CUDA_COMMUNICATION_BUFFERS"}
"""By backend, the variable that has it reduce from memory registered with the communication library."""
LONGEST_TEST = 330
"""The limit of a test, in seconds; above those of distributed tests themselves, whose errors say more."""
NAMED_BY = ("peer", "way", "inner", "size")
"""What a row is told by, of what its benchmark tries."""
HOST_OPTIMIZER = "accelz_cpu.native_kernels.NativeKernels"


def kit(plan: Plan, name: str, limit: float, only: str) -> Outcome:
    """Run the conformance kit, or those of its tests that `only` selects."""
    report = plan.scratch / f"{name}.jsonl"
    options = [
        "-c",
        os.devnull,
        "--no-summary",
        "--accelz-device",
        plan.device,
        "--accelz-report",
        str(report),
    ]
    options += ["-k", only] if only else []
    return run_tests(plan, name, limit, report, *options, "--pyargs", "accelz.conformance")


def pytest_of_tree(plan: Plan, name: str, limit: float, paths: list[str], *options: str) -> Outcome:
    """Run tests of the working tree."""
    log = plan.scratch / f"{name}.jsonl"
    plugin = ["-p", "scripts.device_check.progress", "--test-log", str(log)]
    return run_tests(plan, name, limit, log, *plugin, *options, *paths)


def run_tests(plan: Plan, name: str, limit: float, log: Path, *arguments: str) -> Outcome:
    """Run pytest with only the plugins named here; the outcome is what it has written to `log`.

    A test that hangs is interrupted, after the stacks of all its threads have been logged.
    """
    plugins = ["-p", "no:cacheprovider", "-p", "pytest_timeout", "-p", "accelz.conformance.plugin"]
    limits = [f"--timeout={LONGEST_TEST}", "--timeout-method=signal", "-o", "faulthandler_timeout=240"]
    stopped, code = "", 0
    try:
        code = plan.run(
            name, limit, "-m", "pytest", *plugins, *limits, "-v", "--tb=short", *arguments
        ).returncode
    except subprocess.TimeoutExpired as error:
        stopped = f"stopped after {error.timeout:.0f} s"
    found = progress.read(log)
    if not stopped and not any(found.counts.values()):
        return Outcome(name, False, f"no test ran; see {LOG}")
    ended = stopped or (f"pytest ended with {code}" if code not in (0, 1) else "")
    inside = f" in {', '.join(found.unfinished)}" if ended and found.unfinished else ""
    detail: dict[str, Any] = {"counts": found.counts, "failures": found.failures}
    of_kit = found.summary or {}
    detail |= {"ended": ended + inside}
    detail |= {key: of_kit.get(key, []) for key in ("capabilities", "not_tried")}
    ok = not ended and code == 0 and found.counts["passed"] > 0
    return Outcome(name, ok, "; ".join(filter(None, (found.said(), ended + inside))), detail=detail)


class Target(NamedTuple):
    """The most that `ratio`, a column of the table, may be for peers whose names begin with `peers`."""

    ratio: str
    most: float
    peers: str = "zero"


def compare(plan: Plan, name: str, options: str, *targets: Target, peers: str, part: str = "step") -> Outcome:
    """Time training steps of peers, by `python -m benchmarks PART`. Ratios to peers that are absent have no
    target; nor have those of a quick run."""
    report = plan.scratch / f"{name}.json"
    arguments = ["--device", plan.device, "--json", str(report), *options.split(), "--peers", peers]
    report.unlink(missing_ok=True)  # of a comparison before
    try:
        done = plan.run(name, LONGEST, "-m", "benchmarks", part, *arguments)
    except subprocess.TimeoutExpired as error:
        return Outcome(name, False, f"stopped after {error.timeout:.0f} s")
    if done.returncode or not report.exists():
        return Outcome(name, False, f"failed; see {LOG}")
    result = json.loads(report.read_text(encoding="utf-8"))["results"][0]
    misses = (
        [] if plan.quick else [missed for target in targets for missed in _missed(target, result["rows"])]
    )
    text = ", ".join(f"{row['peer']} {row['median'] * 1e3:.1f} ms" for row in result["rows"])
    return Outcome(name, True, text, misses=misses, detail=result)


def _missed(target: Target, rows: list[dict[str, Any]]) -> list[str]:
    return [
        f"{row['peer']}: {target.ratio} = {row[target.ratio]:.3f}, target {target.most}"
        for row in rows
        if row["peer"].startswith(target.peers) and (row[target.ratio] or 0.0) > target.most
    ]


def host_optimizer(plan: Plan) -> str:
    """The implementation that steps state on the host, or ""."""
    about = device_facts(plan, "cpu")
    return about["kernels"]["adamw"] if about else ""


def what_is_wrong_with(host_optimizer: str) -> list[str]:
    if host_optimizer == HOST_OPTIMIZER:
        return []
    return [
        f"state on the host is stepped by {host_optimizer or 'nobody'}, not by the native library: pass one "
        "with --native FILE, or install CMake and a C++ compiler on this machine"
    ]


def device_facts(plan: Plan, device: str) -> dict[str, Any] | None:
    """What `accelz info` says of a backend, or None. It is asked once: on a GPU that takes seconds."""
    kept = plan.scratch / f"facts-{device}.json"
    if not kept.exists():
        done = plan.run("info", 120, "-m", "accelz.cli", "info", device, "--json")
        try:
            json.loads(done.stdout)
        except ValueError:
            return None
        kept.write_text(done.stdout, encoding="utf-8")
    facts: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8"))
    return facts


def rows_of(
    plan: Plan, name: str, limit: float, module: str, *options: str
) -> tuple[list[dict[str, Any]], str]:
    """Run a benchmark that writes its rows as they come. Returns those it has written, however it ended, and
    how it ended if not well."""
    report = plan.scratch / f"{name}.json"
    arguments = ["-m", module, "--device", plan.device, "--json", str(report), *options]
    try:
        ended = f"failed; see {LOG}" if plan.run(name, limit, *arguments).returncode else ""
    except subprocess.TimeoutExpired as error:
        ended = f"stopped after {error.timeout:.0f} s"
    rows = json.loads(report.read_text(encoding="utf-8"))["rows"] if report.exists() else []
    return rows, ended


def from_rows(
    name: str, rows: list[dict[str, Any]], ended: str, said: list[str], misses: list[str]
) -> Outcome:
    """The outcome of a benchmark that wrote `rows`; those with an error have failed."""
    wrong = [
        f"{' '.join(str(row[key]) for key in NAMED_BY if key in row)} failed: {row['error']}"
        for row in rows
        if "error" in row
    ]
    wrong += [ended] if ended else []
    return Outcome(
        name,
        bool(rows) and not wrong,
        "; ".join([*wrong, *filter(None, said)]),
        misses=misses,
        detail={"measured": rows},
    )


def with_variable(plan: Plan, name: str, value: str = "1") -> Plan:
    return replace(plan, environment={**plan.environment, name: value})
