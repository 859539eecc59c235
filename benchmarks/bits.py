"""Whether training gives the same bits: run to run, and in every way of training that computes the same.

Each variant trains twice, in two processes that go through the variants in opposite orders, at the same time,
so that each disturbs the other's timing. In the mode
"default" the kernels are those that a user gets; some of a GPU's do not give the same bits twice. In
"deterministic" they do, so any difference is the engine's. In "late" side streams are delayed at random too,
by other times in each process, so that work which is not ordered after what it needs shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Literal

import zero
from benchmarks import peers
from benchmarks.bits_rank import BitsRank, Mode, Trace, Variant
from benchmarks.job import Job, JobError
from benchmarks.model import count_parameters
from benchmarks.result import Result

GENERATED = "zero3, generated code"
STREAMED = {"optimizer": "host", "step": "device"}
VARIANTS: dict[str, Variant] = {
    "plain": Variant("plain", None),
    "zero1": Variant("zero", {"stage": 1}),
    "zero2": Variant("zero", {"stage": 2}),
    "zero3": Variant("zero"),
    "zero3, prefetch 0": Variant("zero", {"prefetch": 0}),
    "zero3, prefetch 2": Variant("zero", {"prefetch": 2}),
    "zero3, prefetch 3": Variant("zero", {"prefetch": 3}),
    "zero3, streamed state": Variant("zero", {"offload": zero.Offload(**STREAMED)}),
    "zero3, parameters on the host": Variant("zero", {"offload": zero.Offload(**STREAMED, params="host")}),
    "zero3, compiled": Variant("zero", {"compile": zero.Compile(inner="aot_eager")}),
    GENERATED: Variant("inductor", {"compile": zero.Compile()}),
    "zero3, state on the host": Variant("host", {"offload": zero.Offload(optimizer="host")}),
    "zero3, all on the host": Variant("host", {"offload": zero.Offload(optimizer="host", params="host")}),
}
BY_MODE: dict[Mode, tuple[str, ...]] = {
    "deterministic": tuple(VARIANTS),
    "late": tuple(name for name in VARIANTS if name not in ("plain", GENERATED)),
    "default": ("plain", "zero2", "zero3"),
}
"""The variants of each mode. Streams are the engine's alone; "default" shows what a user's kernels do."""


class BitsError(JobError):
    """Runs that must give the same bits did not."""


@dataclass(frozen=True)
class BitsOptions:
    """Options of the benchmark.

    device: the accelz backend. batch: sequences per rank. steps: of each run. limit: seconds for one run.
    """

    device: str = "cpu"
    size: str = "small"
    precision: Literal["bf16", "fp32"] = "bf16"
    ranks: int = 1
    threads: int = 1
    batch: int = 2
    length: int = 128
    steps: int = 12
    modes: tuple[Mode, ...] = tuple(BY_MODE)
    limit: float = 120.0


def run(options: BitsOptions) -> Result:
    """Train every variant twice in every mode. Raises JobError if a run fails or hangs."""
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    with _launch(options, 1) as first, _launch(options, 2) as second, ThreadPoolExecutor() as pool:
        asked = any(GENERATED in BY_MODE[mode] for mode in options.modes)
        generated = asked and first.call("generates_code")[0]
        if asked and not generated:
            notes.append(f"no generated code: torch's compiler has none for {options.device}")
        for mode in options.modes:
            if mode == "late" and not first.call("has_streams")[0]:
                notes.append(f"not late: {options.device} finishes each operation before it returns")
                continue
            names = [name for name in BY_MODE[mode] if name != GENERATED or generated]
            once = pool.submit(_traces, first, names, mode, options)
            again = pool.submit(_traces, second, names[::-1], mode, options)
            rows += compare(mode, once.result(), again.result())
    settings = {**asdict(options), "parameters": count_parameters(options.size)}
    return Result("bits", settings, rows, notes)


def compare(
    mode: Mode, once: Mapping[str, list[Trace]], again: Mapping[str, list[Trace]]
) -> list[dict[str, Any]]:
    """A row for each variant. once, again: its traces by rank, in the first run and in the second.

    repeats, agrees: whether losses and weights, of every rank, are those of the second run, and those of the
    first variant that must be alike; or the first step from which they are not.
    """
    rows = []
    reference: dict[str, str] = {}
    for name, traces in once.items():
        model = reference.setdefault(VARIANTS[name].alike, name)
        repeats, agrees = first_difference(traces, again[name]), first_difference(traces, once[model])
        rows.append(
            {
                "variant": name,
                "mode": mode,
                "alike": model,
                "repeats": _said(repeats),
                "agrees": _said(agrees),
                "right": mode == "default" or (repeats is None and agrees is None),
                "last_loss": traces[0].last_loss,
                "weights": traces[0].weights,
            }
        )
    return rows


def first_difference(first: Sequence[Trace], second: Sequence[Trace]) -> int | None:
    """The first step, from 0, whose loss differs on any rank; the number of steps if only weights differ."""
    found = [_parting(a, b) for a, b in zip(first, second, strict=True)]
    return min((step for step in found if step is not None), default=None)


def check(result: Result) -> None:
    """Raise BitsError if runs that must give the same bits did not."""
    wrong = [f"{row['variant']} ({row['mode']})" for row in result.rows if not row["right"]]
    if wrong:
        raise BitsError(f"not the same bits: {', '.join(wrong)}; see the table")


def _said(step: int | None) -> str:
    return "the same" if step is None else f"other bits from step {step}"


def _parting(first: Trace, second: Trace) -> int | None:
    pairs = enumerate(zip(first.losses, second.losses, strict=True))
    step = next((step for step, (a, b) in pairs if a != b), None)
    if step is None and first.weights != second.weights:
        return len(first.losses)
    return step


def _launch(options: BitsOptions, seed: int) -> Job:
    setting = peers.Setting(options.precision, options.ranks, options.batch, options.limit)
    args = (options.device, options.size, options.length, setting, seed)
    return Job(BitsRank, args, options.ranks, options.threads, options.limit)


def _traces(job: Job, names: Sequence[str], mode: Mode, options: BitsOptions) -> dict[str, list[Trace]]:
    return {name: job.call("trace", VARIANTS[name], mode, options.steps) for name in names}
