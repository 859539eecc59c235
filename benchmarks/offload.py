"""Optimizer state off the device: bytes and throughput of the disk tier, time of the host tier."""

from __future__ import annotations

import importlib.util
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import zero
from benchmarks.job import Job
from benchmarks.result import Result
from zero.host_memory import bytes_of
from zero.tiers.swap_file import BLOCK, PAGE, THREADS, aligned

GRAIN = 4 << 20  # elements of a layer, and of a record at one rank


@dataclass(frozen=True)
class OffloadOptions:
    """parameters: of the model, in layers of 4 Mi. folder: on the disk to measure."""

    parameters: int = 1 << 27
    ranks: int = 2
    threads: int = 1
    rounds: int = 5
    folder: str | None = None
    limit: float = 120.0


def run(options: OffloadOptions) -> Result:
    """A row for each way of stepping: medians over interleaved rounds of the slowest rank."""
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
    return Result("offload", {**asdict(options), "folder": "", "block": BLOCK}, rows, notes)


def _ways(folder: str) -> dict[str, tuple[Callable[..., object], tuple[Any, ...]]]:
    disk = {"optimizer": "disk", "path": folder}
    ways: dict[str, tuple[Callable[..., object], tuple[Any, ...]]] = {
        "raw disk": (Probe, ()),
        "zero disk": (Zero, (disk,)),
        "zero disk, compact": (Zero, ({**disk, "compact": True},)),
        "zero host": (Zero, ({"optimizer": "host"},)),
    }
    if importlib.util.find_spec("deepspeed") is not None:
        ways["deepspeed cpu"] = (DeepSpeed, ())
    return ways


def _measure(jobs: dict[str, Job], rounds: int) -> dict[str, list[tuple[float, int]]]:
    turns: dict[str, list[tuple[float, int]]] = {name: [] for name in jobs}
    for round_ in range(rounds + 1):
        for name, job in jobs.items():
            results = job.call("turn")
            if round_:  # the first one is warm-up
                turns[name].append((max(r[0] for r in results), sum(r[1] for r in results)))
    return turns


def _row(
    name: str,
    mine: list[tuple[float, int]],
    turns: dict[str, list[tuple[float, int]]],
    options: OffloadOptions,
) -> dict[str, Any]:
    seconds = [turn for turn, _ in mine]
    row: dict[str, Any] = dict.fromkeys(("bytes_per_parameter", "bytes_per_second", "of_raw", "to_deepspeed"))
    row |= {
        "by": name,
        "median": median(seconds),
        "min": min(seconds),
        "max": max(seconds),
        "rounds": seconds,
    }
    if mine[0][1]:
        rates = [nbytes / turn for turn, nbytes in mine]
        raw = [nbytes / turn for turn, nbytes in turns["raw disk"]]
        row["bytes_per_parameter"] = mine[0][1] / options.parameters
        row["bytes_per_second"] = median(rates)
        row["of_raw"] = median(a / b for a, b in zip(rates, raw, strict=True))
    if name == "zero host" and "deepspeed cpu" in turns:
        theirs = [turn for turn, _ in turns["deepspeed cpu"]]
        row["to_deepspeed"] = median(a / b for a, b in zip(seconds, theirs, strict=True))
    return row


def model_of(parameters: int) -> nn.Module:
    """Square layers of GRAIN elements, as many as it takes."""
    width = int(GRAIN**0.5)
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(parameters // GRAIN)))


def batch_of(model: nn.Module) -> Tensor:
    """Random, so that no state is of a kind that a disk could store in less space."""
    return torch.randn(8, int(GRAIN**0.5), dtype=torch.bfloat16)


class Zero:
    """One rank of an engine; `turn` times its optimizer step."""

    def __init__(self, parameters: int, folder: str, offload: dict[str, Any]) -> None:
        model = model_of(parameters)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        config = zero.Config(precision="bf16", units=("Linear",), offload=zero.Offload(**offload))
        self._engine = zero.initialize(model, optimizer, config)

    def turn(self) -> tuple[float, int]:
        engine = self._engine
        engine.backward(engine(batch_of(engine.module)).float().square().mean())
        file = engine._stores.swap_file if engine.config.tiers.path else None
        before = file.bytes_read + file.bytes_written if file else 0
        begun = time.perf_counter()
        engine.step()
        seconds = time.perf_counter() - begun
        return seconds, (file.bytes_read + file.bytes_written - before if file else 0)


class Probe:
    """The disk by itself: blocks read and blocks written, as many at once as the engine has under way."""

    def __init__(self, parameters: int, folder: str) -> None:
        self._size = 12 * parameters // int(os.environ["WORLD_SIZE"]) // BLOCK * BLOCK
        path = Path(folder, f"probe-{os.environ['RANK']}")
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._file, 0, self._size)
        self._threads = ThreadPoolExecutor(THREADS)
        self._buffers = [
            aligned(torch.randint(256, (BLOCK + PAGE,), dtype=torch.uint8))[:BLOCK] for _ in range(THREADS)
        ]

    def turn(self) -> tuple[float, int]:
        begun = time.perf_counter()
        moves = [
            self._threads.submit(call, self._file, [bytes_of(self._buffers[n % len(self._buffers)])], place)
            for n, place in enumerate(range(0, self._size, BLOCK))
            for call in (os.preadv, os.pwritev)
        ]
        for move in moves:
            move.result()
        return time.perf_counter() - begun, 2 * self._size


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

    def turn(self) -> tuple[float, int]:
        engine = self._engine
        engine.backward(engine(batch_of(engine.module)).float().square().mean())
        begun = time.perf_counter()
        engine.step()
        return time.perf_counter() - begun, 0
