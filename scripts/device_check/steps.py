"""What is run on the device, each step a process of its own with a time limit."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

OF_COPY = 0.90
"""Target: a streaming kernel's bandwidth, of a device copy's."""
TO_PLAIN = 1.02
"""Target: the engine's step at one rank, in plain PyTorch's."""
TO_FSDP2 = 1.0
"""Target: the engine's step with as much on the host as FSDP2 has there, in FSDP2's."""

FULL_STEP = "--size huge --length 2048 --batch 2 --rounds 7 --peers plain,fsdp2,zero3,zero2"
HOST_PEERS = "fsdp2-host,zero3-host,zero3-host-overlap,zero3-host-params"
FULL_HOST_STEP = f"--size huge --length 2048 --batch 2 --rounds 3 --steps 2 --peers {HOST_PEERS}"
QUICK_HOST_STEP = f"--size tiny --length 16 --batch 1 --rounds 1 --no-memory --peers {HOST_PEERS}"
QUICK_STEP = "--size tiny --length 16 --batch 1 --rounds 1 --peers plain,zero3 --no-memory"


@dataclass
class Outcome:
    """How a step ended. ok: nothing failed. misses: targets that were not met. detail: its own result."""

    name: str
    ok: bool
    summary: str
    seconds: float = 0.0
    misses: list[str] = field(default_factory=list)
    detail: Any = None

    def plain(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Plan:
    """quick: a small part of everything, to see that it runs. ranks: the most that share the device."""

    device: str
    out: Path
    environment: dict[str, str]
    quick: bool
    ranks: int

    def run(self, name: str, limit: float, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`python ARGUMENTS`, its output in out/NAME.log. Raises TimeoutExpired after `limit` seconds."""
        with (self.out / f"{name}.log").open("w") as log:
            return subprocess.run(
                [sys.executable, *arguments],
                env=self.environment,
                stdout=subprocess.PIPE,
                stderr=log,
                timeout=limit,
                check=False,
                text=True,
            )


def info(plan: Plan) -> Outcome:
    """What the device is, and who implements what."""
    done = plan.run("info", 120, "-m", "accelz.cli", "info", plan.device, "--json")
    facts = _json(done.stdout)
    if facts is None:
        return Outcome("info", False, f"accelz info {plan.device} failed; see info.log")
    return Outcome("info", True, f"{facts['device_count']} device(s), torch {facts['torch']}", detail=facts)


def conformance(plan: Plan) -> Outcome:
    """The kit: what the backend declares, proved."""
    only = ["-k", "rng or norm or peak"] if plan.quick else []
    done = plan.run("conformance", 300, "-m", "accelz.cli", "check", plan.device, "--json", *only)
    summary = _json(done.stdout)
    if summary is None:
        return Outcome("conformance", False, "the kit did not run; see conformance.log")
    counts = ", ".join(f"{summary[k]} {k}" for k in ("passed", "failed", "skipped"))
    return Outcome("conformance", summary["ok"], counts, detail=summary)


def engine(plan: Plan) -> Outcome:
    """zero's own tests on the device: one rank, and several that share it."""
    report = plan.out / "engine.xml"
    command = ["-m", "pytest", "tests/zero", "--device", plan.device, "--max-ranks", str(plan.ranks)]
    command += ["--junitxml", str(report), "-p", "no:cacheprovider"]
    command += ["-k", "test_units or clip"] if plan.quick else []
    done = plan.run("engine", 420, *command)
    (plan.out / "engine.txt").write_text(done.stdout)
    if not report.exists():
        return Outcome("engine", False, "pytest wrote no report; see engine.txt")
    counts, failures = _junit(report)
    report.unlink()
    text = ", ".join(f"{n} {kind}" for kind, n in counts.items())
    return Outcome("engine", done.returncode == 0, text, detail={"counts": counts, "failures": failures})


def bandwidth(plan: Plan) -> Outcome:
    """Every kernel against a copy on the device."""
    size = 1 << 16 if plan.quick else 1 << 27
    target = plan.out / "bandwidth.json"
    arguments = ["--device", plan.device, "--elements", str(size), "--rounds", "3" if plan.quick else "15"]
    done = plan.run("bandwidth", 180, "-m", "benchmarks", "bandwidth", *arguments, "--json", str(target))
    if done.returncode or not target.exists():
        return Outcome("bandwidth", False, "failed; see bandwidth.log")
    rows = json.loads(target.read_text())["results"][0]["rows"]
    target.unlink()
    misses = [
        f"{r['kernel']} {r['dtypes']}: {r['of_copy']:.2f} of a copy's bandwidth, target {OF_COPY}"
        for r in rows
        if r["kernel"] != "copy" and r["of_copy"] < OF_COPY and not plan.quick
    ]
    copy = next(r for r in rows if r["kernel"] == "copy")
    summary = f"a copy moves {copy['bytes_per_second'] / 1e9:.0f} GB/s"
    return Outcome("bandwidth", True, summary, misses=misses, detail=rows)


def step(plan: Plan) -> Outcome:
    """A training step at one rank beside plain PyTorch and FSDP2, in equal precision."""
    return _compare(plan, "step", QUICK_STEP if plan.quick else FULL_STEP, "to_plain", TO_PLAIN)


def offload(plan: Plan) -> Outcome:
    """A training step at one rank with state on the host, beside FSDP2's CPUOffloadPolicy.

    The target is for what keeps as much there; FSDP2 cannot keep less.
    """
    options = QUICK_HOST_STEP if plan.quick else FULL_HOST_STEP
    return _compare(plan, "offload", options, "to_fsdp2-host", TO_FSDP2, only="zero3-host-params")


def _compare(plan: Plan, name: str, options: str, ratio: str, target: float, only: str = "zero") -> Outcome:
    """Training steps of several peers. target: of `ratio`, for peers whose names begin with `only`."""
    report = plan.out / f"{name}.json"
    arguments = ["--device", plan.device, "--ranks", "1", "--json", str(report), *options.split()]
    done = plan.run(name, 300, "-m", "benchmarks", "step", *arguments)
    if done.returncode or not report.exists():
        return Outcome(name, False, f"failed; see {name}.log")
    result = json.loads(report.read_text())["results"][0]
    report.unlink()
    misses = [
        f"{row['peer']}: {ratio} = {row[ratio]:.3f}, target {target}"
        for row in result["rows"]
        if row["peer"].startswith(only) and row[ratio] > target and not plan.quick
    ]
    text = ", ".join(f"{row['peer']} {row['median'] * 1e3:.1f} ms" for row in result["rows"])
    return Outcome(name, True, text, misses=misses, detail=result)


STEPS = {f.__name__: f for f in (info, conformance, bandwidth, step, engine, offload)}
"""In the order in which they are worth most where time runs out."""


def attempt(name: str, plan: Plan) -> Outcome:
    """Run a step; one that takes too long has failed."""
    started = time.monotonic()
    try:
        outcome = STEPS[name](plan)
    except subprocess.TimeoutExpired as error:
        outcome = Outcome(name, False, f"stopped after {error.timeout:.0f} s")
    outcome.seconds = round(time.monotonic() - started, 1)
    return outcome


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _junit(report: Path) -> tuple[dict[str, int], list[dict[str, str]]]:
    """Counts by outcome, and the failures with the end of their text."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    failures = []
    for case in ElementTree.parse(report).iter("testcase"):
        bad = next((c for c in case if c.tag in ("failure", "error")), None)
        if bad is not None:
            counts["failed"] += 1
            name = f"{case.get('classname')}::{case.get('name')}"
            failures.append({"test": name, "text": (bad.text or "")[-1500:]})
        elif case.find("skipped") is not None:
            counts["skipped"] += 1
        else:
            counts["passed"] += 1
    return counts, failures
