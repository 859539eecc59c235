"""The compiled path: fp32 parameters under bf16 autocast, on the CPU over gloo.

It uses gloo there because shared memory makes a gather nearly free, while the fused downcast reduces what
travels; on request it uses a link that is slower than the machine's own loopback. Times are measured with
generated code. The CPU's memory is the exact peak of the simulated device, where the inner compiler runs the
operations one by one: resident sets on the host would include the compiler's own memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

from accelz.discovery import installed
from benchmarks import step
from benchmarks.compiled_peers import EAGER, FSDP2, FSDP2_AUTOCAST, NOT_FUSED, ONE_AHEAD, PEERS
from benchmarks.link import limited
from benchmarks.result import Result, ratio

EXACT_DEVICE = "sim"
FIRST_STEPS = 5  # by then it has been decided which units persist
MEMORY_STEPS = 4


@dataclass(frozen=True)
class CompiledOptions:
    """Options of the benchmark.

    device: the accelz backend. batch: sequences per rank. steps: timed steps in a turn. peers: some of
    `compiled_peers.PEERS` and `ON_REQUEST`. link: Gbit/s that the ranks' loopback carries in all; None for no
    limit. limit: seconds that one call may take. within: seconds after which no further round begins; None
    for no limit.
    """

    device: str = "cpu"
    size: str = "medium"
    ranks: int = 2
    threads: int = 1
    batch: int = 2
    length: int = 128
    rounds: int = 7
    steps: int = 3
    peers: tuple[str, ...] = tuple(PEERS)
    memory: bool = True
    link: float | None = None
    limit: float = 300.0
    within: float | None = None


def run(options: CompiledOptions) -> Result:
    """Time all peers, and measure memory if the simulated device is installed.

    Raises JobError, and LinkError if no link can be limited.
    """
    with limited(options.link):
        result = step.run(_step_options(options, options.device))
    rows = {row["peer"]: row for row in result.rows}
    peaks = {name: row["rank_bytes"] for name, row in rows.items()}
    if options.device == "cpu":
        exact = options.memory and installed(EXACT_DEVICE)
        named = [name for name in options.peers if exact and not name.startswith(FSDP2)]
        peaks = {name: _peak(name, options) for name in named}
    settings = result.settings | {"link": options.link}
    return Result("compiled", settings, [_row(r, rows, peaks) for r in result.rows], result.notes)


def _step_options(options: CompiledOptions, device: str) -> step.StepOptions:
    return step.StepOptions(
        device=device,
        size=options.size,
        precision="bf16",  # for FSDP2's policy; zero's parameters stay fp32 under autocast
        ranks=options.ranks,
        threads=options.threads,
        batch=options.batch,
        length=options.length,
        rounds=options.rounds,
        steps=options.steps,
        peers=options.peers,
        memory=False,
        limit=options.limit,
        within=options.within,
    )


def _peak(name: str, options: CompiledOptions) -> int:
    """The peak of device memory over steps, in bytes, of the rank with the largest."""
    with step.launch(name, _step_options(options, EXACT_DEVICE)) as job:
        job.call("build")
        job.call("run", FIRST_STEPS, 0)
        return max(turn.peak for turn in job.call("run", MEMORY_STEPS, 0))


def _row(row: dict[str, Any], rows: dict[str, dict[str, Any]], peaks: dict[str, int]) -> dict[str, Any]:
    name, moved = row["peer"], row["moved"] or {}
    peak, unfused = peaks.get(name), peaks.get(NOT_FUSED)
    return row | {
        "to_unfused": _to(row, rows.get(NOT_FUSED)),
        "to_eager": _to(row, rows.get(EAGER)),
        "to_one_ahead": _to(row, rows.get(ONE_AHEAD)),
        "to_fsdp2": _to(row, rows.get(FSDP2)),
        "to_fsdp2_autocast": _to(row, rows.get(FSDP2_AUTOCAST)),
        "gathered_bytes": moved.get("all_gather"),
        "reduced_bytes": moved.get("reduce_scatter"),
        "peak_bytes": peak,
        "peak_to_unfused": peak / unfused if peak and unfused else None,
    }


def _to(row: dict[str, Any], other: dict[str, Any] | None) -> float | None:
    """The ratio of the medians of each round."""
    if other is None:
        return None
    return ratio([median(mine) for mine in row["rounds"]], [median(its) for its in other["rounds"]])
