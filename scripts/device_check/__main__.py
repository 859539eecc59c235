"""`scripts/device-check`: conformance, kernels, the engine, and what they reach, on the device at hand."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from scripts.device_check import report, tree
from scripts.device_check.steps import STEPS, Outcome, Plan, attempt

HARDWARE = """
import platform, torch, accelz
kind = accelz.use({0!r}).device.type
name = getattr(torch.get_device_module(kind), "get_device_name", platform.processor)
print(name() or platform.machine())
"""


def main() -> int:
    options = _arguments().parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="device-check-") as site:
        environment = tree.assemble(Path(site), options.wheels)
        environment["ACCELZ_CUDA_SHARED_DEVICE"] = "1"  # ranks share the one GPU there is
        plan = Plan(options.device, options.out, environment, options.quick, options.ranks)
        about = report.context(options.device, _hardware(plan))
        outcomes: list[Outcome] = []
        for name in options.steps.split(","):
            outcomes.append(attempt(name, plan))
            _show(outcomes[-1])
            (options.out / "device-check.json").write_text(report.as_json(about, outcomes))
            (options.out / "device-check.md").write_text(report.as_markdown(about, outcomes))
    return 0 if all(o.ok and not o.misses for o in outcomes) else 1


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/device-check", description=__doc__)
    parser.add_argument("device", nargs="?", default="cuda", help="the accelz backend (default: cuda)")
    parser.add_argument("--out", type=Path, default=Path("runs/device-check"), help="folder for the results")
    parser.add_argument("--wheels", type=Path, help="folder of wheels for what this Python lacks")
    parser.add_argument("--quick", action="store_true", help="a small part of everything")
    parser.add_argument("--ranks", type=int, default=2, help="the most ranks that share the device (2)")
    parser.add_argument("--steps", default=",".join(STEPS), help=f"some of {','.join(STEPS)}")
    return parser


def _hardware(plan: Plan) -> str:
    """The device's own name; of the host where it has none."""
    done = subprocess.run(
        [sys.executable, "-c", HARDWARE.format(plan.device)],
        env=plan.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip().rpartition("\n")[2] or "unknown hardware"


def _show(outcome: Outcome) -> None:
    state = "ok" if outcome.ok else "FAILED"
    print(f"{outcome.name:<12} {state:<7} {outcome.seconds:>6} s  {outcome.summary}", flush=True)
    for miss in outcome.misses:
        print(f"{'':<12} below target: {miss}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
