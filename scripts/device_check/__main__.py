"""Conformance, kernels, the engine's tests and what they reach, on the device at hand.

Runs the working tree as it is, with this Python's torch and without an installation or a package index. It
needs pytest and pytest-timeout, and what zero depends on; `--wheels` brings what is missing. Writes
device-check.json, device-check.md and device-check.log.

Where a machine is to be had for minutes at a time, divide the steps and give each call a limit under them:
  scripts/device-check cuda --limit 570 --within 60 --plan first --out runs/1
  scripts/device-check cuda --limit 570 --within 60 --plan compiled --out runs/2
  scripts/device-check --join runs/*/device-check.json --out runs/all
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from scripts.device_check import native, report, tree
from scripts.device_check.outcome import Outcome
from scripts.device_check.plan import SHARED_DEVICE, Plan
from scripts.device_check.steps import PLANS, STEPS, attempt

HARDWARE_SECONDS = 120
HARDWARE = """
import platform, torch, accelz
accelerator = accelz.use({0!r})
name = getattr(torch.get_device_module(accelerator.device.type), "get_device_name", platform.processor)
print(accelerator.device_count(), name() or platform.machine())
"""
MOST_WORKERS = 8
DEFAULTS = {
    SHARED_DEVICE: "1",
    "ACCELZ_PATIENCE": "2",
    "NCCL_DEBUG": "WARN",
    "TORCHINDUCTOR_COMPILE_THREADS": "4",
}
"""Let ranks share the one GPU there is, in turns, and log what goes wrong between them. Inductor would start
a process for every core in every rank."""
PYTEST = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
"""No plugins except those that a step names, since what others do to a run says nothing of the device."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _arguments().parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        if options.join:
            about, outcomes = report.join(options.join)
            report.write(options.out, about, outcomes)
        else:
            outcomes = _run(options, time.monotonic() + options.limit)
    except (tree.WheelError, report.JoinError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0 if all(o.ok and not o.misses for o in outcomes) else 1


def _run(options: argparse.Namespace, deadline: float) -> list[Outcome]:
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="device-check-") as folder:
        site, scratch = Path(folder, "site"), Path(folder, "scratch")
        scratch.mkdir()
        environment = {**DEFAULTS, **tree.assemble(site, options.wheels), **PYTEST}
        environment.pop("ACCELZ_DEVICE", None)  # every step names its device
        library = native.provide(
            site / tree.NATIVE, tree.ROOT / tree.NATIVE, scratch / "build", options.native
        )
        plan = Plan(
            options.device,
            options.out,
            scratch,
            environment,
            options.quick,
            options.ranks,
            tuple(options.tests),
            options.k,
            options.workers,
            options.within,
            deadline,
        )
        hardware, count = _hardware(plan)
        about = report.context(options.device, hardware, library)
        plan = replace(plan, devices=count)
        if count >= plan.ranks:
            plan = replace(plan, environment={**plan.environment, SHARED_DEVICE: "0"})
        for name in options.steps:
            outcomes.append(attempt(name, plan))
            _show(outcomes[-1])
            report.write(options.out, about, outcomes)
            if name == "shared" and not outcomes[-1].ok and plan.ranks > 1:
                print(f"{'':<12} ranks cannot share the device: the rest runs on one rank", flush=True)
                alone = {**plan.environment, SHARED_DEVICE: "0"}
                plan = replace(plan, ranks=1, environment=alone)
    return outcomes


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/device-check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("device", nargs="?", default="cuda", help="the accelz backend (default: cuda)")
    parser.add_argument("--out", type=Path, default=Path("runs/device-check"), help="folder for the results")
    parser.add_argument("--wheels", type=Path, help="folder of wheels for what this Python lacks")
    parser.add_argument(
        "--native",
        type=Path,
        help="a built libaccelz_cpu.so, for state on the host (default: the one installed in this Python, or "
        "built here; elsewhere: cmake -S accelz_cpu -B build && cmake --build build)",
    )
    parser.add_argument("--quick", action="store_true", help="run only a small part of everything")
    parser.add_argument(
        "--ranks", type=int, default=2, help="the largest number of ranks that share the device (2)"
    )
    parser.add_argument(
        "--steps", type=_steps, default=list(STEPS), help=f"comma-separated, some of {','.join(STEPS)}"
    )
    parser.add_argument(
        "--plan",
        dest="steps",
        type=_planned,
        help="the steps of one call: "
        + "; ".join(f"{name} ({steps.replace(',', ', ')})" for name, steps in PLANS.items()),
    )
    parser.add_argument("--limit", type=float, default=math.inf, help="time limit for everything, in seconds")
    parser.add_argument(
        "--tests", nargs="+", default=[], help="for the step engine: files or folders of tests"
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=_workers(),
        help="for the step engine: processes that run tests side by side, by pytest-xdist (default: half as "
        f"many as there are cores, at most {MOST_WORKERS}; 1 without pytest-xdist)",
    )
    parser.add_argument(
        "--within",
        type=float,
        default=180.0,
        help="for the steps that compare peers: seconds after which no further round begins (180)",
    )
    parser.add_argument("-k", default="", help="for the step engine: an expression for pytest's -k")
    parser.add_argument(
        "--join", type=Path, nargs="+", metavar="JSON", help="run nothing: merge several results into one"
    )
    return parser


def _workers() -> int:
    """How many processes run tests: each has two cores, one of them for the ranks it starts."""
    return min(MOST_WORKERS, max(1, (os.cpu_count() or 1) // 2)) if find_spec("xdist") else 1


def _steps(names: str) -> list[str]:
    chosen = names.split(",")
    unknown = [name for name in chosen if name not in STEPS]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; the steps are {', '.join(STEPS)}")
    return chosen


def _planned(name: str) -> list[str]:
    if name not in PLANS:
        raise argparse.ArgumentTypeError(f"unknown: {name}; the plans are {', '.join(PLANS)}")
    return _steps(PLANS[name])


def _hardware(plan: Plan) -> tuple[str, int]:
    """The device's own name, or the host's processor if it has none; and how many there are."""
    try:
        done = plan.run("hardware", HARDWARE_SECONDS, "-c", HARDWARE.format(plan.device))
    except subprocess.TimeoutExpired:
        return "hardware that does not answer", 1
    count, _, name = done.stdout.strip().rpartition("\n")[2].partition(" ")
    return (name, int(count)) if count.isdigit() else ("unknown hardware", 1)


def _show(outcome: Outcome) -> None:
    state = "ok" if outcome.ok else "FAILED"
    print(f"{outcome.name:<12} {state:<7} {outcome.seconds:>6} s  {outcome.summary}", flush=True)
    for miss in outcome.misses:
        print(f"{'':<12} below target: {miss}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
