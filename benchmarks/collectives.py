"""Collectives of bf16 through accelz, against plain gloo and a memory copy."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import accelz
from accelz import Collectives
from accelz.gloo import GlooLanes
from benchmarks.job import Job
from benchmarks.result import Result, ratio, spread

# torch 2.13 renames these two; 2.11 has only the old names.
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
MEGABYTE = 1_000_000
TURN_BYTES = 64 * MEGABYTE  # small operations are repeated until a turn moves this many bytes


@dataclass(frozen=True)
class CollectivesOptions:
    """Options of the benchmark.

    megabytes: sizes of the whole buffer (10^6 bytes). limit: seconds that one call may take.
    """

    megabytes: tuple[float, ...] = (0.001, 1, 8, 64)
    ranks: int = 2
    threads: int = 1
    rounds: int = 9
    limit: float = 120.0


class CollectivesRank:
    """All of them in one process, which is fair because they hold nothing between calls.

    lanes: accelz between ranks that share no memory, or of a device without a library of its own.
    """

    def __init__(self, timeout: float) -> None:
        collectives = accelz.current().collectives
        self._group = collectives.init(timeout)
        self._accelz, self._lanes = collectives, GlooLanes()
        self._gloo: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        self._rank, self._size = self._group.rank, self._group.size

    def prepare(self, operation: str, nbytes: int) -> dict[str, bool]:
        """Make the buffers and do each call once; returns whether each result is right."""
        numel = nbytes // 2 // self._size * self._size
        self._full = torch.zeros(numel, dtype=torch.bfloat16)
        self._shard = torch.zeros(numel // self._size, dtype=torch.bfloat16)
        self._calls = self._make_calls(operation, torch.ones_like(self._full))
        return {name: self._is_right(operation, call) for name, call in self._calls.items() if name != "copy"}

    def round(self, repeats: int, turn: int) -> dict[str, float]:
        """Seconds per operation, by implementation, each measured from a barrier.

        Each turn begins with another of them, as what runs before leaves its mark on caches.
        """
        names = list(self._calls)
        first = turn % len(names)
        order = names[first:] + names[:first]
        seconds = {name: self._time(self._calls[name], repeats) for name in order}
        return {name: seconds[name] for name in names}

    def _make_calls(self, operation: str, other: Tensor) -> dict[str, Callable[[], object]]:
        full, shard, group, gloo = self._full, self._shard, self._group, self._gloo
        self._parts, even = torch.zeros_like(full), [shard.numel()] * self._size
        parts = self._parts

        def through(calls: Collectives) -> dict[str, Callable[[], object]]:
            return {
                "all_gather": lambda: calls.all_gather(full, shard, group),
                "reduce_scatter": lambda: calls.reduce_scatter(shard, full, group),
                "all_reduce": lambda: calls.all_reduce(full, group),
                "all_to_all": lambda: calls.all_to_all(full, parts, even, even, group),
            }

        plain: dict[str, Callable[[], object]] = {
            "all_gather": lambda: _gather(full, shard, group=gloo),
            "reduce_scatter": lambda: _scatter(shard, full, group=gloo),
            "all_reduce": lambda: dist.all_reduce(full, group=gloo),
            "all_to_all": lambda: dist.all_to_all_single(full, parts, group=gloo),
        }
        return {
            "accelz": through(self._accelz)[operation],
            "lanes": through(self._lanes)[operation],
            "gloo": plain[operation],
            "copy": lambda: full.copy_(other),
        }

    def _is_right(self, operation: str, call: Callable[[], object]) -> bool:
        ranks = torch.arange(1, self._size + 1, dtype=torch.bfloat16)
        whole = ranks.repeat_interleave(self._shard.numel())
        if operation == "all_reduce":
            self._full.fill_(self._rank + 1)
            call()
            return bool((self._full == ranks.sum()).all())
        if operation != "reduce_scatter":
            self._full.zero_()
            self._shard.fill_(self._rank + 1)
            self._parts.fill_(self._rank + 1)
            call()
            return torch.equal(self._full, whole)
        self._full.copy_(whole)
        self._shard.zero_()
        call()
        return bool((self._shard == (self._rank + 1) * self._size).all())

    def _time(self, call: Callable[[], object], repeats: int) -> float:
        dist.barrier(group=self._gloo)
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - start) / repeats


def run(options: CollectivesOptions) -> Result:
    rows = []
    with Job(CollectivesRank, (options.limit,), options.ranks, options.threads, options.limit) as job:
        for operation in OPERATIONS:
            for megabytes in options.megabytes:
                rows += _measure(job, operation, round(megabytes * MEGABYTE), options.rounds)
    return Result("collectives", asdict(options), rows)


def _measure(job: Job, operation: str, nbytes: int, rounds: int) -> list[dict[str, Any]]:
    right = job.call("prepare", operation, nbytes)
    repeats = max(1, min(16, TURN_BYTES // nbytes))
    turns = [_slowest(job.call("round", repeats, turn)) for turn in range(rounds)]
    return [_row(operation, nbytes, name, turns, all(r.get(name, True) for r in right)) for name in turns[0]]


def _slowest(ranks: list[dict[str, float]]) -> dict[str, float]:
    return {name: max(r[name] for r in ranks) for name in ranks[0]}


def _row(
    operation: str, nbytes: int, name: str, turns: list[dict[str, float]], right: bool
) -> dict[str, Any]:
    seconds = [t[name] for t in turns]
    return {
        "operation": operation,
        "bytes": nbytes,
        "through": name,
        **spread(seconds),
        "bytes_per_second": nbytes / median(seconds),
        "speedup": ratio([t["gloo"] for t in turns], seconds),
        "right": right,
        "rounds": seconds,
    }
