"""A training step of every peer, interleaved.

Every peer has its own processes. All of them are alive at the same time, and only one peer at a time is not
idle: a round gives each peer one turn of a few steps. So neighbours in time are compared (the machine drifts
over minutes, and ratios are taken within a round), while no peer inherits another's allocator state, threads
or patches. A turn begins with an untimed step, which also warms the caches; the order rotates by one every
round. If memory, the device's or that of a host with state, cannot hold all peers at once, each turn is a
launch of its own.

Peers whose losses part are not doing the same work, and are not compared: there is no table then.

A device that counts its memory reports the peak of every turn; elsewhere further launches measure it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from statistics import fmean, median
from typing import Any, Literal

import psutil  # type: ignore[import-untyped]

from benchmarks import compiled_peers, memory, offload_peers, peers
from benchmarks.hosts import Hosts, two_hosts
from benchmarks.job import LAUNCH_LIMIT, Job, JobError
from benchmarks.model import SIZES, activation_bytes, count_parameters
from benchmarks.result import Result, ratio, spread
from benchmarks.step_rank import StepRank, Turn

FIRST_STEPS = 2  # untimed steps after a launch: allocations, connections, recorded schedules
MEMORY_STEPS = 4  # steps of a launch that measures memory
STATE_BYTES = 22  # per parameter and rank, of the largest peer: ddp with fp32 masters
HOST_STATE_BYTES = 36  # likewise on the host: page-locked buffers, rounded up, some of them twice
PROCESS_BYTES = 300_000_000  # a process after its imports, activations included
CONTEXT_BYTES = 600_000_000  # device memory of a process that has nothing there yet
FILLED = 0.8  # of the free memory at most, since allocating and freeing leaves gaps
LOSS_REFERENCE = "ddp"
LOSS_BOUND = 0.01  # of a loss: what peers' losses of one step may differ by; they round at other places
REFERENCES = (
    "plain",
    "fsdp2",
    "fsdp2-host",
    "fsdp2-hsdp",
    "deepspeed3-host",
    "zero3",
)  # peers whose time all others are compared with


class LossError(JobError):
    """Peers' losses differ by more than `LOSS_BOUND`."""


@dataclass(frozen=True)
class StepOptions:
    """Options of the benchmark.

    device: the accelz backend. batch: sequences per rank. steps: timed steps in a turn. limit: seconds that
    one call may take. link: Gbit/s between two hosts that the ranks are divided between; None for one host.
    within: seconds after which no further round begins; None for no limit.
    """

    device: str = "cpu"
    size: str = "medium"
    precision: Literal["bf16", "fp32"] = "bf16"
    ranks: int = 2
    threads: int = 1
    batch: int = 2
    length: int = 128
    rounds: int = 7
    steps: int = 4
    peers: tuple[str, ...] = tuple(peers.PEERS)
    memory: bool = True
    limit: float = 120.0
    optimizer: Literal["adamw", "muon"] = "adamw"
    link: float | None = None
    within: float | None = None


@dataclass
class Record:
    """A peer's measurements so far.

    rounds: seconds of the timed steps, by round, each of the slowest rank. losses: of all steps, mean over
    ranks. moved: bytes per step of one rank, by kind of collective.
    """

    rounds: list[list[float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    moved: dict[str, float] | None = None
    peak: memory.Peak | None = None

    def add(self, turns: Sequence[Turn]) -> None:
        """Add one turn, as each rank measured it."""
        peaks = [turn.peak for turn in turns if turn.peak is not None]
        if peaks:
            now = memory.Peak(max(peaks), sum(peaks))
            self.peak = now if self.peak is None else max(self.peak, now, key=lambda peak: peak.node)
        self.losses += [fmean(step) for step in zip(*(t.losses for t in turns), strict=True)]
        if turns[0].seconds:
            self.rounds.append([max(step) for step in zip(*(t.seconds for t in turns), strict=True)])

    @property
    def medians(self) -> list[float]:
        return [median(seconds) for seconds in self.rounds]


def run(options: StepOptions) -> Result:
    """Time all peers of `options` that are installed.

    Raises JobError if one fails or hangs, and LinkError if two hosts cannot be created.
    """
    if options.link is None:
        return _run(options, None)
    with two_hosts(options.link) as hosts:
        return _run(options, hosts)


def _run(options: StepOptions, hosts: Hosts | None) -> Result:
    names = [name for name in options.peers if peers.is_installed(name)]
    records = {name: Record() for name in names}
    together = _fits(options, names, hosts)
    turns = _turns_together if together else _turns_apart
    for name, job, first in turns(options, names, hosts):
        records[name].add(job.call("run", FIRST_STEPS if first else 1, 0 if first else options.steps))
        records[name].moved = job.call("traffic")[0]
    check_losses(_comparable(records, options.ranks))
    for name, record in records.items():
        if record.peak is None and options.memory and memory.available():
            record.peak = _measure_memory(name, options, hosts)
    settings = {
        **asdict(options),
        "parameters": count_parameters(options.size),
        "shape": asdict(SIZES[options.size]),
        "launches": "one per peer, all alive" if together else "one per peer and round",
    }
    return Result("step", settings, [_row(name, records) for name in names], _notes(options, records))


def check_losses(losses: dict[str, list[float]]) -> None:
    """Raise LossError unless all peers have about the same loss in every step."""
    for step, of_step in enumerate(zip(*losses.values(), strict=True)):
        first, *others = of_step
        if not all(abs(loss - first) <= LOSS_BOUND * abs(first) for loss in others):  # so not if one is NaN
            each = ", ".join(f"{name} {loss:.5f}" for name, loss in zip(losses, of_step, strict=True))
            raise LossError(
                f"peers train differently, so their times are not compared: in step {step} the losses are "
                f"{each}, which differ by more than {LOSS_BOUND:.0%}"
            )


def _comparable(records: dict[str, Record], ranks: int) -> dict[str, list[float]]:
    """The losses of peers that train on the same batches, in about the same arithmetic: `plain` has its own
    rank's alone."""
    others = {*compiled_peers.ON_REQUEST, *(("plain",) if ranks > 1 else ())}
    return {name: record.losses for name, record in records.items() if name not in others}


def launch(name: str, options: StepOptions, hosts: Hosts | None = None) -> Job:
    setting = peers.Setting(
        options.precision,
        options.ranks,
        options.batch,
        options.limit,
        options.optimizer,
        1 if hosts is None else len(hosts.places),
    )
    args = (options.device, name, options.size, options.length, setting)
    return Job(StepRank, args, options.ranks, options.threads, options.limit, hosts)


def _measure_memory(name: str, options: StepOptions, hosts: Hosts | None) -> memory.Peak:
    """Measure a peer's memory on the host, in a launch of its own."""
    with launch(name, options, hosts) as job:
        base = memory.base(job.pids)
        job.call("build", limit=LAUNCH_LIMIT)
        with memory.PeakMeter(job.pids, base) as meter:
            job.call("run", MEMORY_STEPS, 0)
        return meter.peak


def _turns_together(
    options: StepOptions, names: Sequence[str], hosts: Hosts | None
) -> Iterator[tuple[str, Job, bool]]:
    """Yield (peer, its ranks, whether they have just been launched), turn by turn."""
    with ExitStack() as stack:
        jobs = {name: stack.enter_context(launch(name, options, hosts)) for name in names}
        for name, job in jobs.items():
            job.call("build", limit=LAUNCH_LIMIT)
            yield name, job, True
        for name in _order(names, options):
            yield name, jobs[name], False


def _turns_apart(
    options: StepOptions, names: Sequence[str], hosts: Hosts | None
) -> Iterator[tuple[str, Job, bool]]:
    for name in _order(names, options):
        with launch(name, options, hosts) as job:
            job.call("build", limit=LAUNCH_LIMIT)
            yield name, job, True
            yield name, job, False


def _order(names: Sequence[str], options: StepOptions) -> Iterator[str]:
    end = time.monotonic() + (math.inf if options.within is None else options.within)
    for turn in range(options.rounds):
        if turn and time.monotonic() > end:
            break
        start = turn % max(len(names), 1)
        yield from (*names[start:], *names[:start])


def _fits(options: StepOptions, names: Sequence[str], hosts: Hosts | None) -> bool:
    """Whether all peers can be alive at once, by a generous estimate."""
    parameters = count_parameters(options.size)
    state = STATE_BYTES * parameters
    on_host = FILLED * int(psutil.virtual_memory().available) / options.ranks
    if options.device == "cpu":
        return len(names) * (state + PROCESS_BYTES) < on_host
    away = len(set(names) & set(offload_peers.PEERS)) * HOST_STATE_BYTES * parameters
    rank = state + CONTEXT_BYTES + activation_bytes(options.size, options.batch * options.length)
    if away + len(names) * PROCESS_BYTES > on_host:
        return False
    return len(names) * rank < FILLED * _device_room(options, names, hosts)


def _device_room(options: StepOptions, names: Sequence[str], hosts: Hosts | None) -> int:
    """Bytes of free device memory for each rank of a job, as measured by a launch."""
    if not names:
        return 0
    with launch(names[0], options, hosts) as job:
        room: int = min(job.call("room", limit=LAUNCH_LIMIT))
        return room


def _row(name: str, records: dict[str, Record]) -> dict[str, Any]:
    record = records[name]
    steps = [seconds for turn in record.rounds for seconds in turn]
    return {
        "peer": name,
        **spread(steps),
        **{f"to_{other}": _to(record, records.get(other)) for other in REFERENCES},
        "rank_bytes": record.peak and record.peak.rank,
        "peak_to_fsdp2": _peak_to(record, records.get("fsdp2")),
        "node_bytes": record.peak and record.peak.node,
        "moved_bytes": record.moved if record.moved is None else sum(record.moved.values()),
        "moved": record.moved,
        "first_loss": record.losses[0],
        "last_loss": record.losses[-1],
        "loss_error": None if name == "plain" else _loss_error(record, records.get(LOSS_REFERENCE)),
        "rounds": record.rounds,
        "losses": record.losses,
    }


def _to(record: Record, other: Record | None) -> float | None:
    """The ratio of the medians of each round."""
    return None if other is None else ratio(record.medians, other.medians)


def _peak_to(record: Record, other: Record | None) -> float | None:
    return record.peak.rank / other.peak.rank if record.peak and other and other.peak else None


def _loss_error(record: Record, reference: Record | None) -> float | None:
    """The largest relative difference of any step's loss."""
    if reference is None:
        return None
    return max(abs(a - b) / abs(b) for a, b in zip(record.losses, reference.losses, strict=True))


def _notes(options: StepOptions, records: dict[str, Record]) -> list[str]:
    notes = [
        f"{name} is absent: {peers.REQUIRES[name]} is not installed "
        "(pip install -r benchmarks/requirements-peers.txt)"
        for name in options.peers
        if name not in records
    ]
    if "plain" in records and options.ranks > 1:
        notes.append("plain does not communicate: each rank trains a model of its own, so its losses differ")
    return notes
