"""Steps that measure the engine beside its peers, and say which targets are missed."""

from __future__ import annotations

import json
import os
from typing import Any

from scripts.device_check.outcome import Outcome
from scripts.device_check.plan import LOG, SHARED_DEVICE, Plan
from scripts.device_check.running import (
    LONGEST,
    REGISTERED,
    Target,
    compare,
    device_facts,
    from_rows,
    host_optimizer,
    rows_of,
    what_is_wrong_with,
    with_variable,
)

OF_COPY = 0.90
"""Target for the bandwidth of a streaming kernel, as a fraction of a device copy's."""
COPIES = ("copy", "host to device", "device to host")
"""What is measured besides kernels: copies on the device, and over the link to the host."""
STEP = (Target("to_plain", 0.92), Target("to_fsdp2", 0.80), Target("peak_to_fsdp2", 0.95))
"""Of a step of 0.94 G parameters at one rank."""
SMALL = (Target("to_plain", 1.00),)
"""Of a model of 98 M parameters, whose steps are short beside what the engine itself takes."""
SMALL_CAPTURED = (Target("to_zero3", 0.80, "zero3-captured"),)
COMPILED = (Target("to_fsdp2", 0.90, "zero3, one"),)
COMPILED_CAPTURED = (Target("to_eager", 0.80, "zero3, graphs"),)
FLOAT8 = (Target("to_one_ahead", 0.80, "zero3, float8"),)
"""Relative to the same compiled step in bf16."""
FURTHEST = {"aot_eager": 0.0, "inductor": 1e-2}
"""How far, relatively, losses of replayed graphs may be from those of called ones, by what compiles them.
Inductor fuses other operations where it compiles segments by themselves."""
OFFLOAD = (Target("to_fsdp2-host", 1.00, "zero3-host-params"),)
"""With as much on the host as FSDP2 has, which cannot keep less there."""
DEEPSPEED = (Target("to_deepspeed3-host", 0.50),)
DEEPSPEED_DEVICES = ("cpu", "cuda")
SEVERAL = (Target("to_fsdp2", 1.00),)
RESERVED = 1.05
"""Most bytes that the allocator may take from the device for each that is in use, at both's peaks."""
PEAK = 0.95
"""Target for the engine's peak over steps of changing lengths, relative to FSDP2's."""
HOOKS = 25e-6
"""Seconds of the host for the hooks of a unit in a step."""
COMPILING = 1.2
"""Target for the time that compiling takes, relative to the plain model's."""

# If memory cannot hold all peers at once, every turn is a launch of its own; so there are fewer rounds.
FULL_STEP = "--ranks 1 --size huge --length 2048 --batch 2 --rounds 7"
FULL_SMALL = "--ranks 1 --size large --length 1024 --batch 2 --rounds 9"
FULL_SEVERAL = "--size huge --length 2048 --batch 2 --rounds 5"
QUICK_STEP = "--ranks 1 --size tiny --length 16 --batch 1 --rounds 1 --no-memory"
FULL_COMPILED = "--ranks 1 --no-memory --size large --length 1024 --batch 2 --rounds 7"
FULL_FLOAT8 = "--ranks 1 --no-memory --size 1b --length 2048 --batch 2 --rounds 2 --steps 6"
QUICK_COMPILED = "--ranks 1 --no-memory --size tiny --length 16 --batch 1 --rounds 1 --steps 1"
COMPILED_PEERS = "zero3, one ahead; zero3, eager; fsdp2, compiled; fsdp2, compiled, autocast"
CAPTURED_PEERS = "zero3, eager; zero3, graphs"
BF16_PEER = "zero3, one ahead"
FLOAT8_WAYS = ("tensorwise", "rowwise", "tensorwise, codes travel")
FULL_OFFLOAD = "--ranks 1 --size huge --length 2048 --batch 2 --rounds 3 --steps 2"
FULL_OFFLOAD_3B = "--ranks 1 --size 3b --length 2048 --batch 2 --rounds 1 --steps 4"
OFFLOAD_PEERS = "fsdp2-host,zero3-host,zero3-host-params,zero3-auto"
OFFLOAD_3B_PEERS = "fsdp2-host,zero3-host-params,zero3-auto,zero3-streamed"
DEEPSPEED_PEERS = "zero3-host-params,zero3-auto,deepspeed3-host"
FULL_BITS = "--size small --length 512 --steps 12"
QUICK_BITS = "--size tiny --length 16 --steps 3 --modes default"
FULL_LENGTHS = "--size huge --length 2048 --batch 2 --steps 200"
QUICK_LENGTHS = "--steps 3 --peers zero3,fsdp2"
QUICK_HOOKS = "--layers 2 --steps 3"
FULL_COMPILE_TIME = "--size large --length 1024 --batch 2"
QUICK_COMPILE_TIME = "--inner aot_eager --ways plain,zero3"
FULL_CURVES = "--size small --length 256 --batch 8 --steps 300"
QUICK_CURVES = "--steps 3 --ways bf16,tensorwise"
LARGEST_PEERS = "zero3-auto,zero3-host-params,fsdp2-host,deepspeed3-host"
FULL_LARGEST = f"--sizes 7b,9b,13b --length 2048 --least 6 --within 330 --peers {LARGEST_PEERS}"
QUICK_LARGEST = "--sizes tiny --peers zero3-auto"


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
    if not _captures(plan):
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


def replayed(plan: Plan) -> Outcome:
    """Replay a compiled model's forward and backward as graphs, where the device captures: their losses
    beside those of called graphs, and the time that both take."""
    if not _captures(plan):
        return Outcome("replayed", True, f"{plan.device} captures no graphs")
    size = "--steps 12" if plan.quick else "--size large --length 512 --steps 40"
    rows, ended = list[dict[str, Any]](), ""
    for inner in ("aot_eager",) if plan.quick else tuple(FURTHEST):
        options = ("--inner", inner, *size.split())
        more, how = rows_of(plan, f"replayed-{inner}", 200, "benchmarks.replayed", *options)
        rows, ended = rows + more, ended or how
    for row in rows:
        if not row["replays"] or row["failed"] or row["furthest"] > FURTHEST[row["inner"]]:
            told = row["failed"] or f"{row['replays']} replays"
            row["error"] = f"{told}, losses off by {row['furthest']:.0e}"
    said = [
        f"{row['inner']}: {row['captured']} of {row['segments']} segments captured, losses within "
        f"{row['furthest']:.0e}; called {row['called'] * 1e3:.1f} ms, {row['host_called'] * 1e3:.1f} of the "
        f"host; replayed {row['replayed'] * 1e3:.1f} ms, {row['host_replayed'] * 1e3:.1f} of the host"
        for row in rows
    ]
    return from_rows("replayed", rows, ended, said, [])


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


def step(plan: Plan) -> Outcome:
    """Time a training step at one rank beside plain PyTorch and FSDP2, in equal precision."""
    return compare(
        plan,
        "step",
        _full(plan, FULL_STEP, QUICK_STEP),
        *STEP,
        peers=_peers(plan, "plain,zero3", "fsdp2,zero2"),
    )


def small(plan: Plan) -> Outcome:
    """Time the step of a small model at one rank, where the engine's own time shows; then captured."""
    captures, options = _captures(plan), _full(plan, FULL_SMALL, QUICK_STEP)
    outcome = compare(plan, "small", options, *SMALL, peers=_peers(plan, "plain,zero3", "fsdp2"))
    if not captures:
        return outcome
    again = compare(plan, "small", options, *SMALL_CAPTURED, peers="zero3,zero3-captured")
    return _both(outcome, again, "captured")


def several(plan: Plan) -> Outcome:
    """Time the step at as many ranks as there are devices; then with gradients in registered memory."""
    ranks = 2 if plan.quick else plan.devices
    if ranks < 2:
        return Outcome("several", True, "not measured: there is one device")
    options = f"{_full(plan, FULL_SEVERAL, QUICK_STEP)} --ranks {ranks}"
    plan = with_variable(plan, SHARED_DEVICE, "0")
    outcome = compare(plan, "several", options, *SEVERAL, peers=_peers(plan, "zero3,zero2", "ddp,fsdp2"))
    if plan.device not in REGISTERED or not outcome.ok:
        return outcome
    registering = with_variable(plan, REGISTERED[plan.device])
    again = compare(registering, "registered", options, *SEVERAL, peers="fsdp2,zero3")
    return _both(outcome, again, "gradients in registered memory")


def compiled(plan: Plan) -> Outcome:
    """Time the compiled step at one rank beside FSDP2's; then with its graphs and the optimizer captured."""
    captures, options = _captures(plan), _full(plan, FULL_COMPILED, QUICK_COMPILED)
    peers = "zero3, eager" if plan.quick else COMPILED_PEERS  # generating code takes a minute
    outcome = compare(plan, "compiled", options, *COMPILED, peers=peers, part="compiled")
    if not captures:
        return outcome
    again = compare(plan, "compiled", options, *COMPILED_CAPTURED, peers=CAPTURED_PEERS, part="compiled")
    return _both(outcome, again, "captured")


def compile_time(plan: Plan) -> Outcome:
    """Time the first steps of compiled models, from empty caches, beside the plain model's."""
    options = QUICK_COMPILE_TIME if plan.quick else FULL_COMPILE_TIME
    rows, ended = rows_of(plan, "compile_time", LONGEST, "benchmarks.compile_time", *options.split())
    seconds = {row["way"]: row["compiling"] for row in rows if "compiling" in row}
    ratio = seconds["zero3"] / seconds["plain"] if {"zero3", "plain"} <= seconds.keys() else 0.0
    misses = (
        [f"zero3 compiles in {ratio:.2f} of plain's time, target {COMPILING}"] if ratio > COMPILING else []
    )
    said = [", ".join(f"{way} {taken:.1f} s" for way, taken in seconds.items())]
    return from_rows("compile_time", rows, ended, said, [] if plan.quick else misses)


def float8(plan: Plan) -> Outcome:
    """Time the compiled step with products in float8 beside the same in bf16, where torchao is installed."""
    if lacking := _why_no_float8(plan):
        return Outcome("float8", True, lacking)
    if plan.quick:
        peers = "zero3, eager; zero3, float8 tensorwise, eager"
        return compare(plan, "float8", QUICK_COMPILED, peers=peers, part="compiled")
    options = _full(plan, FULL_FLOAT8, QUICK_COMPILED)
    first, *others = (
        compare(
            plan, "float8", options, *FLOAT8, peers=f"{BF16_PEER}; zero3, float8 {scales}", part="compiled"
        )
        for scales in FLOAT8_WAYS
    )
    for scales, other in zip(FLOAT8_WAYS[1:], others, strict=True):
        first = _both(first, other, scales)
    return first


def curves(plan: Plan) -> Outcome:
    """Compare loss curves of training with products in float8 with those in bf16, and two seeds'."""
    if lacking := _why_no_float8(plan):
        return Outcome("curves", True, lacking)
    options = QUICK_CURVES if plan.quick else FULL_CURVES
    rows, ended = rows_of(plan, "curves", 300, "benchmarks.loss_curves", *options.split())
    complete = [row for row in rows if "of_way" in row]
    misses = [
        f"{row['way']}: {row['of_way']:.3f} from bf16's curve, target {row['of_seeds']:.3f}, as two seeds are"
        for row in complete
        if row["of_way"] > row["of_seeds"] and not plan.quick
    ]
    said = [", ".join(f"{row['way']} ends at {row['last']:.3f}" for row in complete)]
    return from_rows("curves", rows, ended, said, misses)


def lengths(plan: Plan) -> Outcome:
    """Count memory over steps of changing lengths: what is in use, and what the allocator takes."""
    options = QUICK_LENGTHS if plan.quick else FULL_LENGTHS
    rows, ended = rows_of(plan, "lengths", 300, "benchmarks.lengths", *options.split())
    peaks = {row["peer"]: row["peak"] for row in rows if row.get("peak")}
    misses = [
        f"{row['peer']}: {row['reserved'] / row['peak']:.3f} of its peak are reserved, target {RESERVED}"
        for row in rows
        if row["peer"] == "zero3" and row.get("reserved") and row["reserved"] > RESERVED * row["peak"]
    ]
    if {"zero3", "fsdp2"} <= peaks.keys() and peaks["zero3"] > PEAK * peaks["fsdp2"]:
        misses.append(f"zero3: a peak of {peaks['zero3'] / peaks['fsdp2']:.3f} of fsdp2's, target {PEAK}")
    said = [
        ", ".join(f"{peer} {peak / 1e6:.0f} MB" for peer, peak in peaks.items())
        or f"{plan.device} counts none"
    ]
    return from_rows("lengths", rows, ended, said, [] if plan.quick else misses)


def hooks(plan: Plan) -> Outcome:
    """Time what the engine's hooks take of the host in a step, per unit."""
    options = QUICK_HOOKS if plan.quick else ""
    rows, ended = rows_of(plan, "hooks", 120, "benchmarks.hooks", *options.split())
    each = [row for row in rows if "per unit" in row["peer"]]
    said = [
        f"{row['passes'] * 1e6:.1f} us a unit in forward and backward, {row['step'] * 1e6:.1f} in the step"
        for row in each
    ]
    misses = [
        f"{row['passes'] * 1e6:.1f} us a unit, target {HOOKS * 1e6:.0f}"
        for row in each
        if row["passes"] > HOOKS
    ]
    return from_rows("hooks", rows, ended, said, [] if plan.quick else misses)


def offload(plan: Plan) -> Outcome:
    """Time a training step at one rank with state on the host, beside FSDP2's CPUOffloadPolicy."""
    peers = "fsdp2-host,zero3-host-params" if plan.quick else OFFLOAD_PEERS
    return _offloaded(plan, "offload", FULL_OFFLOAD, OFFLOAD, peers)


def offload_3b(plan: Plan) -> Outcome:
    """The same at 3 G parameters, by more ways of offloading, and beside FSDP2's."""
    peers = "zero3-auto,zero3-streamed" if plan.quick else OFFLOAD_3B_PEERS
    return _offloaded(plan, "offload_3b", FULL_OFFLOAD_3B, OFFLOAD, peers)


def deepspeed(plan: Plan) -> Outcome:
    """The same beside DeepSpeed's ZeRO-3 with parameters and optimizer state on the host."""
    if plan.device not in DEEPSPEED_DEVICES:
        return Outcome("deepspeed", True, f"not measured: DeepSpeed knows no {plan.device}")
    if plan.run("deepspeed", 120, "-c", "import deepspeed").returncode:
        return Outcome("deepspeed", True, "NOT MEASURED: DeepSpeed is not installed; bring it with --wheels")
    peers = "zero3-host-params,deepspeed3-host" if plan.quick else DEEPSPEED_PEERS
    return _offloaded(plan, "deepspeed", FULL_OFFLOAD_3B, DEEPSPEED, peers)


def largest(plan: Plan) -> Outcome:
    """Search for the largest model that trains with state on the host, by way of offloading."""
    options = f"--threads {_host_threads()} {QUICK_LARGEST if plan.quick else FULL_LARGEST}"
    rows, ended = rows_of(plan, "largest", LONGEST, "benchmarks.largest", *options.split())
    trained = [row for row in rows if "error" not in row]
    misses = [] if any(row["parameters"] > 7e9 for row in trained) else ["no model of 7 G parameters trained"]
    best = {row["peer"]: row for row in trained}
    said = [
        f"{row['peer']} {row['parameters'] / 1e9:.2f} G at {row['tokens_per_second']:.0f} tokens/s"
        for row in best.values()
    ]
    for row in rows:
        if "error" in row and row["peer"] in best:  # where a way's search ends
            row["ended"] = row.pop("error")
    return from_rows("largest", rows, ended, said, [] if plan.quick else misses)


def _full(plan: Plan, full: str, quick: str) -> str:
    return quick if plan.quick else f"{full} --within {plan.within}"


def _peers(plan: Plan, always: str, in_full: str) -> str:
    return always if plan.quick else f"{always},{in_full}"


def _captures(plan: Plan) -> bool:
    """Whether the device captures graphs; True if it does not say, so that steps fail instead of passing."""
    facts = device_facts(plan, plan.device)
    return facts is None or facts["capabilities"]["graph_capture"] is True


def _host_threads() -> int:
    return max(1, (os.cpu_count() or 1) // 2)


def _both(first: Outcome, second: Outcome, what: str) -> Outcome:
    """One outcome of two comparisons; what: in which the second differs."""
    first.ok &= second.ok
    first.summary += f"; {what}: {second.summary}"
    first.misses += [f"{what}: {miss}" for miss in second.misses]
    first.detail = {**(first.detail or {}), what: second.detail}
    return first


def _offloaded(plan: Plan, name: str, full: str, targets: tuple[Target, ...], peers: str) -> Outcome:
    options = f"--threads {_host_threads()} {_full(plan, full, QUICK_STEP)}"
    wrong = what_is_wrong_with(host_optimizer(plan))
    outcome = compare(plan, name, options, *targets, peers=peers)
    outcome.ok = outcome.ok and not wrong
    outcome.summary = "; ".join([*wrong, outcome.summary])
    return outcome


def _why_no_float8(plan: Plan) -> str:
    """Why products in float8 cannot be measured, or ""."""
    facts = device_facts(plan, plan.device)
    if facts is not None and facts["scaled_mm"] == "none":
        return f"not measured: {plan.device} declares no products in float8"
    if plan.run("float8", 60, "-c", "import torchao.float8").returncode:
        return "NOT MEASURED: torchao is not installed; bring it with --wheels"
    return ""
