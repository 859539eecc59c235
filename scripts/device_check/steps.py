"""The steps that are run on the device, each a process of its own with a time limit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import traceback
from pathlib import Path
from typing import Any

from scripts.device_check import progress
from scripts.device_check.outcome import Outcome
from scripts.device_check.plan import LOG, Plan

LONGEST = 560.0
"""The limit, in seconds, of a step that may take minutes."""
LONGEST_TEST = 330
"""The limit of a test, in seconds; above those of distributed tests themselves, whose errors say more."""
OF_COPY = 0.90
"""Target for the bandwidth of a streaming kernel, as a fraction of a device copy's."""
TO_PLAIN = 1.02
"""Target for the time of the engine's step at one rank, relative to plain PyTorch's."""
SMALL_TO_PLAIN = 1.00
"""The same for a model of 98 M parameters, whose steps are short beside what the engine itself takes."""
COMPILED_TO_FSDP2 = 0.9
"""Target for the time of the engine's compiled step at one rank, relative to FSDP2's, compiled."""
TO_FSDP2 = 1.0
"""Target for the time of the engine's step with as much on the host as FSDP2 has, relative to FSDP2's."""

OWN_KERNELS = ("cuda",)
"""Backends that have kernels for every operation: a torch reference must not be in use."""
KERNEL_TESTS = {"cuda": "tests/backends/test_cuda_device.py"}
"""By backend, tests of its kernels that need the device."""
SANITIZER, SANITIZER_SECONDS = "compute-sanitizer", 150
SANITIZED = {"cuda": "scripts.device_check.sanitized"}
"""By backend, a program that runs each of its kernels."""
COPIES = ("copy", "host to device", "device to host")
"""What is measured besides kernels: copies on the device, and over the link to the host."""
ENGINE_TESTS = ("tests/zero",)
QUICK_ENGINE_TESTS = ("tests/zero/communication/test_traffic.py",)
HOST_OPTIMIZER = "accelz_cpu.native_kernels.NativeKernels"

# If memory cannot hold all peers at once, every turn is a launch of its own; so there are fewer rounds.
FULL_STEP = "--size huge --length 2048 --batch 2 --rounds 7 --peers plain,fsdp2,zero3,zero2"
FULL_HOST_STEP = (
    "--size huge --length 2048 --batch 2 --rounds 3 --steps 2 --peers fsdp2-host,zero3-host,zero3-host-params"
)
FULL_BITS = "--size small --length 512 --steps 12"
QUICK_BITS = "--size tiny --length 16 --steps 3 --modes default"
FULL_SMALL = "--size large --length 1024 --batch 2 --rounds 9 --peers plain,fsdp2,zero3"
FULL_COMPILED = "--size large --length 1024 --batch 2 --rounds 7"
QUICK_COMPILED = "--size tiny --length 16 --batch 1 --rounds 1 --steps 1"
COMPILED_PEERS = "zero3, one ahead; zero3, eager; fsdp2, compiled; fsdp2, compiled, autocast"
QUICK_STEP = "--size tiny --length 16 --batch 1 --rounds 1 --no-memory --peers plain,zero3"
QUICK_HOST_STEP = (
    "--size tiny --length 16 --batch 1 --rounds 1 --no-memory --peers fsdp2-host,zero3-host-params"
)


def info(plan: Plan) -> Outcome:
    """What the device is, and who implements which kernel, also for state on the host."""
    facts = _facts(plan, plan.device)
    if facts is None:
        return Outcome("info", False, f"accelz info {plan.device} failed; see {LOG}")
    references = [
        name
        for name, origin in facts["kernels"].items()
        if origin == "torch reference" and plan.device in OWN_KERNELS
    ]
    facts["host_optimizer"] = facts["kernels"]["adamw"] if plan.device == "cpu" else _host_optimizer(plan)
    wrong = [f"torch references are used instead of kernels: {', '.join(references)}"] if references else []
    wrong += _what_is_wrong_with(facts["host_optimizer"])
    said = f"{facts['device_count']} device(s), torch {facts['torch']}"
    return Outcome("info", not wrong, "; ".join([said, *wrong]), detail=facts)


def shared(plan: Plan) -> Outcome:
    """Check whether ranks can share the device, collectives included."""
    return _kit(plan, "shared", 120, "share_a_device")


def conformance(plan: Plan) -> Outcome:
    """Run the conformance kit, which tests what the backend declares."""
    outcome = _kit(plan, "conformance", 300, "rng or norm or peak" if plan.quick else "")
    untested = [] if plan.quick or not outcome.detail else outcome.detail["not_tried"]
    outcome.summary += "".join(f"; NOT TESTED: {row['what']}" for row in untested)
    return outcome


def kernels(plan: Plan) -> Outcome:
    """Test the backend's kernels against float64, and what only a device shows of them."""
    if plan.device not in KERNEL_TESTS:
        return Outcome("kernels", True, f"{plan.device} has no tests of its own besides the kit")
    return _pytest(plan, "kernels", 300, [KERNEL_TESTS[plan.device]])


def bandwidth(plan: Plan) -> Outcome:
    """Time every kernel against a copy on the device."""
    size = 1 << 16 if plan.quick else 1 << 28
    target = plan.scratch / "bandwidth.json"
    arguments = ["--device", plan.device, "--elements", str(size), "--rounds", "3" if plan.quick else "15"]
    done = plan.run("bandwidth", 240, "-m", "benchmarks", "bandwidth", *arguments, "--json", str(target))
    if done.returncode or not target.exists():
        return Outcome("bandwidth", False, f"failed; see {LOG}")
    rows = json.loads(target.read_text(encoding="utf-8"))["results"][0]["rows"]
    misses = [] if plan.quick else below_target(rows)
    copy = next(r for r in rows if r["kernel"] == "copy")
    summary = f"a copy moves {copy['bytes_per_second'] / 1e9:.0f} GB/s"
    return Outcome("bandwidth", True, summary, misses=misses, detail=rows)


def below_target(rows: list[dict[str, Any]]) -> list[str]:
    """Kernels with less than `OF_COPY` of a copy's bandwidth. Copies to and from the host have no target."""
    return [
        f"{r['kernel']} {r['dtypes']}: {r['of_copy']:.2f} of a copy's bandwidth, target {OF_COPY}"
        for r in rows
        if r["kernel"] not in COPIES and r["of_copy"] < OF_COPY
    ]


def bits(plan: Plan) -> Outcome:
    """Check that training gives the same bits twice, and in every way of training that computes the same."""
    rows: list[dict[str, Any]] = []
    failed = False
    for ranks in dict.fromkeys((plan.ranks,) if plan.quick else (1, plan.ranks)):
        report = plan.scratch / f"bits-{ranks}.json"
        arguments = ["--device", plan.device, "--ranks", str(ranks), "--json", str(report)]
        arguments += (QUICK_BITS if plan.quick else FULL_BITS).split()
        done = plan.run(f"bits-{ranks}", LONGEST, "-m", "benchmarks", "bits", *arguments)
        failed |= done.returncode != 0
        if report.exists():
            rows += [
                {"ranks": ranks, **r}
                for r in json.loads(report.read_text(encoding="utf-8"))["results"][0]["rows"]
            ]
    wrong = [f"{row['variant']} ({row['mode']}, {row['ranks']} ranks)" for row in rows if not row["right"]]
    told = f"OTHER BITS: {', '.join(wrong)}" if wrong else f"failed; see {LOG}" if failed else "all alike"
    return Outcome("bits", not failed, f"{len(rows)} ways of training, twice; {told}", detail={"bits": rows})


def captured(plan: Plan) -> Outcome:
    """Replay the optimizer's part of a step as a graph, where the device captures: its bits, and the host's
    time for it."""
    facts = _facts(plan, plan.device)
    if facts is not None and not facts["capabilities"]["graph_capture"]:
        return Outcome("captured", True, f"{plan.device} captures no graphs")
    report = plan.scratch / "captured.json"
    size = "--steps 8" if plan.quick else "--size large --length 512 --steps 40"
    arguments = ["--device", plan.device, "--json", str(report), *size.split()]
    done = plan.run("captured", 120, "-m", "benchmarks.captured", *arguments)
    if done.returncode or not report.exists():
        return Outcome("captured", False, f"failed; see {LOG}")
    found = json.loads(report.read_text(encoding="utf-8"))
    ok = found["same_bits"] and found["replays"] > 0
    said = (
        f"{found['replays']} replays, {'the same' if found['same_bits'] else 'OTHER'} bits; the host takes "
    )
    said += f"{found['called'] * 1e6:.0f} us to call kernels, {found['replayed'] * 1e6:.0f} us to replay"
    return Outcome("captured", ok, said, detail=found)


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


def step(plan: Plan) -> Outcome:
    """Time a training step at one rank beside plain PyTorch and FSDP2, in equal precision."""
    options = QUICK_STEP if plan.quick else f"{FULL_STEP} --within {plan.within}"
    return _compare(plan, "step", options, "to_plain", TO_PLAIN, "zero")


def small(plan: Plan) -> Outcome:
    """Time the step of a small model at one rank, where the engine's own time shows."""
    options = QUICK_STEP if plan.quick else f"{FULL_SMALL} --within {plan.within}"
    return _compare(plan, "small", options, "to_plain", SMALL_TO_PLAIN, "zero")


def compiled(plan: Plan) -> Outcome:
    """Time the compiled step at one rank beside FSDP2's."""
    options = QUICK_COMPILED if plan.quick else f"{FULL_COMPILED} --within {plan.within}"
    peers = "zero3, eager" if plan.quick else COMPILED_PEERS  # generating code takes a minute
    further = ("--no-memory", "--peers", peers)
    return _compare(plan, "compiled", options, "to_fsdp2", COMPILED_TO_FSDP2, "zero3, one", *further)


def engine(plan: Plan) -> Outcome:
    """Run zero's own tests on the device, with one rank and with several that share it."""
    paths = list(plan.tests or (QUICK_ENGINE_TESTS if plan.quick else ENGINE_TESTS))
    options = ["--device", plan.device, "--max-ranks", str(plan.ranks)]
    options += (
        ["-p", "xdist.plugin", "-n", str(plan.workers), "--dist", "worksteal"] if plan.workers > 1 else []
    )
    outcome = _pytest(plan, "engine", LONGEST, paths, *options, *(["-k", plan.only] if plan.only else []))
    most = f"up to {plan.ranks} rank{'s' if plan.ranks > 1 else ''}"
    outcome.part = " ".join(filter(None, [*plan.tests, plan.only, most]))
    return outcome


def offload(plan: Plan) -> Outcome:
    """Time a training step at one rank with state on the host, beside FSDP2's CPUOffloadPolicy.

    The target applies to the peer that keeps as much on the host as FSDP2, which cannot keep less there.
    """
    threads = max(1, (os.cpu_count() or 1) // 2)
    size = QUICK_HOST_STEP if plan.quick else f"{FULL_HOST_STEP} --within {plan.within}"
    options = f"--threads {threads} {size}"
    wrong = _what_is_wrong_with(_host_optimizer(plan))
    outcome = _compare(plan, "offload", options, "to_fsdp2-host", TO_FSDP2, "zero3-host-params")
    outcome.ok = outcome.ok and not wrong
    outcome.summary = "; ".join([*wrong, outcome.summary])
    return outcome


ORDER = (
    info, bits, shared, conformance, kernels, captured, sanitizer, bandwidth, step, small, compiled, engine,
    offload,
)  # fmt: skip
STEPS = {f.__name__: f for f in ORDER}
"""The steps by name, the most valuable first in case time runs out."""


def attempt(name: str, plan: Plan) -> Outcome:
    """Run a step. It counts as failed if it takes too long, or if this program itself fails in it."""
    started = time.monotonic()
    try:
        if started >= plan.deadline:
            return Outcome(name, False, "not run: no time was left")
        outcome = STEPS[name](plan)
    except subprocess.TimeoutExpired as error:
        outcome = Outcome(name, False, f"stopped after {error.timeout:.0f} s; see {LOG}")
    except Exception as error:
        said = f"device-check failed: {type(error).__name__}: {error}"
        outcome = Outcome(name, False, said, detail={"traceback": traceback.format_exc()})
    outcome.seconds = round(time.monotonic() - started, 1)
    return outcome


def _kit(plan: Plan, name: str, limit: float, only: str) -> Outcome:
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
    return _run_tests(plan, name, limit, report, *options, "--pyargs", "accelz.conformance")


def _pytest(plan: Plan, name: str, limit: float, paths: list[str], *options: str) -> Outcome:
    """Run tests of the working tree."""
    log = plan.scratch / f"{name}.jsonl"
    plugin = ["-p", "scripts.device_check.progress", "--test-log", str(log)]
    return _run_tests(plan, name, limit, log, *plugin, *options, *paths)


def _run_tests(plan: Plan, name: str, limit: float, log: Path, *arguments: str) -> Outcome:
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
    kit = found.summary or {}
    detail |= {"ended": ended + inside}
    detail |= {key: kit.get(key, []) for key in ("capabilities", "not_tried")}
    ok = not ended and code == 0 and found.counts["passed"] > 0
    return Outcome(name, ok, "; ".join(filter(None, (found.said(), ended + inside))), detail=detail)


def _compare(
    plan: Plan, name: str, options: str, ratio: str, target: float, only: str, *further: str
) -> Outcome:
    """Time training steps of peers. target: for `ratio`, of the peers whose names begin with `only`."""
    report = plan.scratch / f"{name}.json"
    arguments = ["--device", plan.device, "--ranks", "1", "--json", str(report), *options.split(), *further]
    part = "compiled" if name == "compiled" else "step"
    done = plan.run(name, LONGEST, "-m", "benchmarks", part, *arguments)
    if done.returncode or not report.exists():
        return Outcome(name, False, f"failed; see {LOG}")
    result = json.loads(report.read_text(encoding="utf-8"))["results"][0]
    misses = [
        f"{row['peer']}: {ratio} = {row[ratio]:.3f}, target {target}"
        for row in result["rows"]
        if not plan.quick and row["peer"].startswith(only) and row[ratio] > target
    ]
    text = ", ".join(f"{row['peer']} {row['median'] * 1e3:.1f} ms" for row in result["rows"])
    return Outcome(name, True, text, misses=misses, detail=result)


def _host_optimizer(plan: Plan) -> str:
    """The implementation that steps state on the host, or ""."""
    facts = _facts(plan, "cpu")
    return facts["kernels"]["adamw"] if facts else ""


def _what_is_wrong_with(host_optimizer: str) -> list[str]:
    if host_optimizer == HOST_OPTIMIZER:
        return []
    return [
        f"state on the host is stepped by {host_optimizer or 'nobody'}, not by the native library: pass one "
        "with --native FILE, or install CMake and a C++ compiler on this machine"
    ]


def _facts(plan: Plan, device: str) -> dict[str, Any] | None:
    done = plan.run("info", 120, "-m", "accelz.cli", "info", device, "--json")
    try:
        facts: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        return None
    return facts
