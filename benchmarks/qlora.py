"""QLoRA on a Llama, sharded by zero: beside sharded LoRA in bf16, and beside unsharded QLoRA."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from benchmarks import memory
from benchmarks.job import LAUNCH_LIMIT, Job
from benchmarks.result import Result, ratio, spread

FIRST_STEPS = 3


@dataclass(frozen=True)
class QloraOptions:
    """Options of the benchmark.

    size: of `qlora_rank.SIZES`. batch: sequences per rank. steps: timed steps in a turn. limit: seconds that
    one call may take.
    """

    size: str = "small"
    ranks: int = 2
    threads: int = 1
    batch: int = 1
    length: int = 128
    rounds: int = 5
    steps: int = 2
    limit: float = 300.0


def run(options: QloraOptions) -> Result:
    """Time all ways in turn, and measure the memory of their first steps. Raises JobError."""
    from benchmarks.qlora_rank import WAYS, QloraRank  # imports frameworks that other benchmarks do without

    peaks: dict[str, memory.Peak | None] = {}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    losses: dict[str, list[float]] = {way: [] for way in WAYS}
    with ExitStack() as stack:
        jobs = {}
        for way in WAYS:
            given = (way, options.size, options.batch, options.length, options.limit)
            job = Job(QloraRank, given, options.ranks, options.threads, options.limit)
            jobs[way] = stack.enter_context(job)
            peaks[way] = _first_steps(job, losses[way])
        parameters = jobs[WAYS[0]].call("parameters")[0]
        for turn in range(options.rounds):
            for way in (*WAYS[turn % len(WAYS) :], *WAYS[: turn % len(WAYS)]):
                turns = jobs[way].call("run", 1, options.steps)
                seconds[way].append(
                    fmean(max(step) for step in zip(*(t.seconds for t in turns), strict=True))
                )
                losses[way] += [fmean(step) for step in zip(*(t.losses for t in turns), strict=True)]
    settings = {**asdict(options), "parameters": parameters}
    return Result("qlora", settings, [_row(way, seconds, losses, peaks) for way in WAYS])


def _first_steps(job: Job, losses: list[float]) -> memory.Peak | None:
    """Build the model and do the first steps; the most memory that these take, where the system tells."""
    base = memory.base(job.pids) if memory.available() else None
    job.call("build", limit=LAUNCH_LIMIT)
    if base is None:
        turns, peak = job.call("run", FIRST_STEPS, 0), None
    else:
        with memory.PeakMeter(job.pids, base) as meter:
            turns = job.call("run", FIRST_STEPS, 0)
        peak = meter.peak
    losses += [fmean(step) for step in zip(*(turn.losses for turn in turns), strict=True)]
    return peak


def _row(
    way: str,
    seconds: Mapping[str, list[float]],
    losses: Mapping[str, list[float]],
    peaks: Mapping[str, memory.Peak | None],
) -> dict[str, Any]:
    from benchmarks.qlora_rank import BF16, UNSHARDED

    peak, of_bf16 = peaks[way], peaks[BF16]
    return {
        "way": way,
        **spread(seconds[way]),
        "to_unsharded": ratio(seconds[way], seconds[UNSHARDED]),
        "rank_bytes": peak and peak.rank,
        "node_bytes": peak and peak.node,
        "to_bf16": peak.node / of_bf16.node if peak and of_bf16 else None,
        "first_loss": losses[way][0],
        "last_loss": losses[way][-1],
    }
