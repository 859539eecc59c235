"""Optimizer state off the device: bytes and throughput of the disk tier, time of the host tier."""

from __future__ import annotations

import importlib.util
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import zero
from benchmarks.job import Job
from benchmarks.result import Result, ratio, spread
from zero.tiers.swap_file import PAGE, THREADS, TRANSFER_BLOCK, page_aligned_part
from zero.tiers.tier import ON_DISK
from zero.tiers.values import bytes_of

GRAIN = 4 << 20  # elements of a layer, and of a record at world size 1
RAW = "raw disk"
PATTERNS = [
    (depth, stretch, apart)
    for depth in (THREADS, 2 * THREADS)
    for stretch in (6, 24)
    for apart in (False, True)
]
"""Patterns in which the disk is probed: moves under way at once; blocks by which writing lags behind reading;
whether a stretch is waited for before the next begins. Which one a disk serves best may change from hour to
hour, so each turn takes the best."""


@dataclass(frozen=True)
class Turn:
    """One optimizer step.

    moved: bytes that were requested to be read and written. transferred: bytes that went from and to disks
    meanwhile, according to the kernel's I/O statistics.
    """

    seconds: float
    moved: int = 0
    transferred: int = 0


@dataclass(frozen=True)
class OffloadOptions:
    """Options of the benchmark.

    parameters: of the model, rounded down to whole layers of 4 Mi. folder: on the disk to measure. limit:
    seconds that one call may take.
    """

    parameters: int = 1 << 27
    ranks: int = 2
    threads: int = 1
    rounds: int = 5
    folder: str | None = None
    limit: float = 120.0


def run(options: OffloadOptions) -> Result:
    """Time each way of stepping: a row is the median over interleaved rounds, each of the slowest rank."""
    options = replace(options, parameters=options.parameters // GRAIN * GRAIN)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        ways = _ways(folder)
        jobs = {
            name: Job(
                service,
                (options.parameters, folder, *arguments),
                options.ranks,
                options.threads,
                options.limit,
            )
            for name, (service, arguments) in ways.items()
        }
        try:
            turns = _measure(jobs, options.rounds)
        finally:
            for job in jobs.values():
                job.stop()
    rows = [_row(name, turns[name], turns, options) for name in ways]
    notes = [] if "deepspeed cpu" in ways else ["DeepSpeed is not installed: no row of its CPU offload"]
    return Result("offload", {**asdict(options), "folder": "", "block": TRANSFER_BLOCK}, rows, notes)


def _ways(folder: str) -> dict[str, tuple[Callable[..., object], tuple[Any, ...]]]:
    disk = {"optimizer": "disk", "path": folder}
    ways: dict[str, tuple[Callable[..., object], tuple[Any, ...]]] = {
        RAW: (Probe, ()),
        "zero disk": (Zero, (disk,)),
        "zero disk, split": (Zero, (disk, "split")),
        "zero host": (Zero, ({"optimizer": "host"},)),
    }
    if importlib.util.find_spec("deepspeed") is not None:
        ways["deepspeed cpu"] = (DeepSpeed, ())
    return ways


def _measure(jobs: dict[str, Job], rounds: int) -> dict[str, list[Turn]]:
    turns: dict[str, list[Turn]] = {name: [] for name in jobs}
    for round_ in range(rounds + 1):
        for name, job in jobs.items():
            patterns = PATTERNS if name == RAW else [()]
            turn = min((_together(job, *arguments) for arguments in patterns), key=lambda t: t.seconds)
            if round_:  # the first round is warm-up
                turns[name].append(turn)
    return turns


def _together(job: Job, *arguments: Any) -> Turn:
    """One turn on all ranks: seconds of the slowest, bytes of all together."""
    turns: list[Turn] = job.call("turn", *arguments)
    return Turn(max(t.seconds for t in turns), sum(t.moved for t in turns), sum(t.transferred for t in turns))


def _row(
    name: str,
    mine: list[Turn],
    turns: dict[str, list[Turn]],
    options: OffloadOptions,
) -> dict[str, Any]:
    seconds = [turn.seconds for turn in mine]
    empty = (
        "bytes_per_parameter",
        "kernel_bytes_per_parameter",
        "bytes_per_second",
        "of_raw",
        "to_deepspeed",
    )
    row: dict[str, Any] = dict.fromkeys(empty)
    row |= {
        "by": name,
        **spread(seconds),
        "rounds": seconds,
    }
    if mine[0].moved:
        rates = [turn.moved / turn.seconds for turn in mine]
        raw = [turn.moved / turn.seconds for turn in turns[RAW]]
        row["bytes_per_parameter"] = mine[0].moved / options.parameters
        row["kernel_bytes_per_parameter"] = median(t.transferred for t in mine) / options.parameters
        row["bytes_per_second"] = median(rates)
        row["of_raw"] = ratio(rates, raw)
    if name == "zero host" and "deepspeed cpu" in turns:
        theirs = [turn.seconds for turn in turns["deepspeed cpu"]]
        row["to_deepspeed"] = ratio(seconds, theirs)
    return row


def _transferred() -> int:
    """Bytes that the kernel has read from and written to disks for this process so far."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"]) + int(lines["write_bytes"])


def model_of(parameters: int) -> nn.Module:
    """A model of square layers of GRAIN elements."""
    width = int(GRAIN**0.5)
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(parameters // GRAIN)))


def batch() -> Tensor:
    """A random batch, so that no state is compressible, as a disk might exploit."""
    return torch.randn(8, int(GRAIN**0.5), dtype=torch.bfloat16)


class Zero:
    """One rank of an engine; `turn` times its optimizer step."""

    def __init__(self, parameters: int, folder: str, offload: dict[str, Any], masters: Any = "fp32") -> None:
        model = model_of(parameters)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        placed = zero.Offload(**offload)
        config = zero.Config(precision="bf16", units=("Linear",), offload=placed, masters=masters)
        self._engine = zero.initialize(model, optimizer, config)

    def turn(self) -> Turn:
        engine = self._engine
        engine.backward(engine(batch()).float().square().mean())
        file = engine._boundary.stores.swap_file(ON_DISK) if engine.config.offload.path else None
        moved, transferred = (file.bytes_read + file.bytes_written if file else 0), _transferred()
        begun = time.perf_counter()
        engine.step()
        seconds = time.perf_counter() - begun
        moved = (file.bytes_read + file.bytes_written if file else 0) - moved
        return Turn(seconds, moved, _transferred() - transferred)


class Probe:
    """The disk alone: every block of a file is read and written, in blocks of the engine's size."""

    def __init__(self, parameters: int, folder: str) -> None:
        self._blocks = 12 * parameters // int(os.environ["WORLD_SIZE"]) // TRANSFER_BLOCK
        path = Path(folder, f"probe-{os.environ['RANK']}")
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._file, 0, self._blocks * TRANSFER_BLOCK)
        self._threads = {depth: ThreadPoolExecutor(depth) for depth, *_ in PATTERNS}
        self._read, self._written = (
            _buffers(2 * THREADS) for _ in range(2)
        )  # separate, as both happen at once

    def turn(self, depth: int, stretch: int, apart: bool) -> Turn:
        transferred, begun = _transferred(), time.perf_counter()
        moves: list[Future[int]] = []
        for first in range(0, self._blocks + stretch, stretch):
            reads = range(first, min(first + stretch, self._blocks))
            moves += self._move(depth, reads, range(max(first - stretch, 0), min(first, self._blocks)))
            if apart:
                wait(moves)
        for move in moves:
            move.result()
        seconds = time.perf_counter() - begun
        return Turn(seconds, 2 * self._blocks * TRANSFER_BLOCK, _transferred() - transferred)

    def _move(self, depth: int, reads: range, writes: range) -> Iterator[Future[int]]:
        """Begin reading blocks `reads` and writing blocks `writes`, alternately."""
        for read, write in zip_longest(reads, writes):
            if read is not None:
                yield self._begin(depth, os.preadv, self._read, read)
            if write is not None:
                yield self._begin(depth, os.pwritev, self._written, write)

    def _begin(
        self, depth: int, call: Callable[..., int], buffers: list[memoryview], block: int
    ) -> Future[int]:
        buffer = buffers[block % len(buffers)]
        return self._threads[depth].submit(call, self._file, [buffer], block * TRANSFER_BLOCK)


def _buffers(count: int) -> list[memoryview]:
    """Blocks of random bytes, each page-aligned."""
    memory = bytes_of(
        page_aligned_part(torch.randint(256, (count * TRANSFER_BLOCK + PAGE,), dtype=torch.uint8))
    )
    return [memory[n * TRANSFER_BLOCK : (n + 1) * TRANSFER_BLOCK] for n in range(count)]


class DeepSpeed:
    """One rank of ZeRO-3 with the optimizer on the CPU; `turn` times its step."""

    def __init__(self, parameters: int, folder: str) -> None:
        import deepspeed  # type: ignore[import-not-found]

        model = model_of(parameters)
        settings = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "cpu"},
                "stage3_param_persistence_threshold": 0,
            },
        }
        self._engine = deepspeed.initialize(model=model, config=settings)[0]

    def turn(self) -> Turn:
        engine = self._engine
        engine.backward(engine(batch()).float().square().mean())
        begun = time.perf_counter()
        engine.step()
        return Turn(time.perf_counter() - begun)
