"""Steps that run tests: the kit, the backend's kernels, the engine."""

from __future__ import annotations

import shutil

from scripts.device_check.outcome import Outcome
from scripts.device_check.plan import LOG, Plan
from scripts.device_check.running import (
    LONGEST,
    REGISTERED,
    device_facts,
    host_optimizer,
    kit,
    pytest_of_tree,
    what_is_wrong_with,
    with_variable,
)

OWN_KERNELS = ("cuda",)
"""Backends that have kernels for every operation: a torch reference must not be in use."""
KERNEL_TESTS = {"cuda": "tests/backends/test_cuda_device.py"}
"""By backend, tests of its kernels that need the device."""
SANITIZER, SANITIZER_SECONDS = "compute-sanitizer", 150
SANITIZED = {"cuda": "scripts.device_check.sanitized"}
"""By backend, a program that runs each of its kernels."""
ENGINE_TESTS = ("tests/zero",)
QUICK_ENGINE_TESTS = ("tests/zero/communication/test_traffic.py",)


def info(plan: Plan) -> Outcome:
    """What the device is, and who implements which kernel, also for state on the host."""
    facts = device_facts(plan, plan.device)
    if facts is None:
        return Outcome("info", False, f"accelz info {plan.device} failed; see {LOG}")
    references = [
        name
        for name, origin in facts["kernels"].items()
        if origin == "torch reference" and plan.device in OWN_KERNELS
    ]
    facts["host_optimizer"] = facts["kernels"]["adamw"] if plan.device == "cpu" else host_optimizer(plan)
    wrong = [f"torch references are used instead of kernels: {', '.join(references)}"] if references else []
    wrong += what_is_wrong_with(facts["host_optimizer"])
    said = f"{facts['device_count']} device(s), torch {facts['torch']}"
    return Outcome("info", not wrong, "; ".join([said, *wrong]), detail=facts)


def shared(plan: Plan) -> Outcome:
    """Check whether ranks can share the device, collectives included."""
    if plan.devices >= plan.ranks:
        return Outcome("shared", True, f"not needed: devices {plan.devices}, ranks {plan.ranks}")
    return kit(plan, "shared", 120, "share_a_device")


def conformance(plan: Plan) -> Outcome:
    """Run the conformance kit, which tests what the backend declares."""
    outcome = kit(plan, "conformance", 300, "rng or norm or peak" if plan.quick else "")
    untested = [] if plan.quick or not outcome.detail else outcome.detail["not_tried"]
    outcome.summary += "".join(f"; NOT TESTED: {row['what']}" for row in untested)
    return outcome


def kernels(plan: Plan) -> Outcome:
    """Test the backend's kernels against float64, and what only a device shows of them."""
    if plan.device not in KERNEL_TESTS:
        return Outcome("kernels", True, f"{plan.device} has no tests of its own besides the kit")
    return pytest_of_tree(plan, "kernels", 300, [KERNEL_TESTS[plan.device]])


def sanitizer(plan: Plan) -> Outcome:
    """Run every kernel under the sanitizer: accesses out of bounds, and races in shared memory."""
    program = SANITIZED.get(plan.device)
    if program is None:
        return Outcome("sanitizer", True, f"{plan.device} has no kernels that are checked in this way")
    if shutil.which(SANITIZER) is None:
        return Outcome("sanitizer", False, f"not run: {SANITIZER} is not on this machine")
    said, failed = [], []
    for tool in ("memcheck", "racecheck"):
        under = (SANITIZER, "--tool", tool, "--error-exitcode", "9")
        done = plan.run(f"sanitizer-{tool}", SANITIZER_SECONDS, "-m", program, under=under)
        end = done.stdout.strip().rpartition("\n")[2].strip("= ")
        said.append(f"{tool}: {end or 'no output'}")
        failed += [tool] if done.returncode else []
    return Outcome("sanitizer", not failed, "; ".join(said), detail={"failed": failed})


def engine(plan: Plan) -> Outcome:
    """Run zero's own tests on the device, with one rank and with several that share it."""
    paths = list(plan.tests or (QUICK_ENGINE_TESTS if plan.quick else ENGINE_TESTS))
    options = ["--device", plan.device, "--max-ranks", str(plan.ranks)]
    options += (
        ["-p", "xdist.plugin", "-n", str(plan.workers), "--dist", "worksteal"] if plan.workers > 1 else []
    )
    outcome = pytest_of_tree(
        plan, "engine", LONGEST, paths, *options, *(["-k", plan.only] if plan.only else [])
    )
    most = f"up to {plan.ranks} rank{'s' if plan.ranks > 1 else ''}"
    outcome.part = " ".join(filter(None, [*plan.tests, plan.only, most]))
    return outcome


def registered(plan: Plan) -> Outcome:
    """Run the kit's tests of collectives, with buffers registered with the communication library."""
    variable = REGISTERED.get(plan.device)
    if variable is None:
        return Outcome("registered", True, f"{plan.device} has no variable that registers memory")
    return kit(with_variable(plan, variable), "registered", 180, "test_collectives")
