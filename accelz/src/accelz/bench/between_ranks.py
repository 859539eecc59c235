"""Measures a backend's collectives between ranks on this machine."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from accelz.bench import measure as device
from accelz.conformance.cluster import Cluster, ClusterError, Context
from accelz.errors import AccelzError

MEGABYTE = 1_000_000
SIZES = (1 * MEGABYTE, 8 * MEGABYTE, 64 * MEGABYTE)
"""Bytes of the whole buffer, in bf16."""
TURN_BYTES, MOST = 64 * MEGABYTE, 16
"""Small collectives are repeated until a turn moves this many bytes, but at most so many times."""
SECONDS = 300.0


def measure(name: str, ranks: int, rounds: int, sizes: tuple[int, ...] = SIZES) -> list[dict[str, Any]]:
    """Measure collectives on `ranks` ranks, started for it: medians over rounds, each by its slowest rank.

    of_copy: the time as a multiple of that of a rank's copy of the whole buffer. Raises AccelzError if a rank
    fails.
    """
    cluster = Cluster(name, ranks)
    try:
        found = cluster.run(body, limit=SECONDS, sizes=sizes, rounds=rounds)
    except ClusterError as error:
        raise AccelzError(f"{ranks} ranks cannot communicate on {name!r}: {error}") from error
    finally:
        cluster.stop()
    return [
        _row(operation, nbytes, [rank[operation, nbytes] for rank in found]) for operation, nbytes in found[0]
    ]


def alone(name: str, elements: int, rounds: int) -> list[dict[str, Any]]:
    """Run `bench.measure.measure` in a process that has ended when this returns.

    Ranks that come next then find the device free, even if only one process can have it. Raises AccelzError
    if it cannot be measured.
    """
    cluster = Cluster(name, 1, threads=torch.get_num_threads())
    try:
        found: list[dict[str, Any]] = cluster.run(
            alone_body, limit=SECONDS, elements=elements, rounds=rounds
        )[0]
        return found
    except ClusterError as error:
        raise AccelzError(f"{name!r} cannot be measured: {error}") from error
    finally:
        cluster.stop()


def alone_body(context: Context, elements: int, rounds: int) -> list[dict[str, Any]]:
    return device.measure(context.accelerator, elements, rounds)


def body(
    context: Context, sizes: tuple[int, ...], rounds: int
) -> dict[tuple[str, int], list[tuple[float, float]]]:
    """Return the seconds of each collective and of a copy, for each round, by operation and bytes."""
    return {
        (operation, nbytes): [
            _turn(context, calls, max(1, min(MOST, TURN_BYTES // nbytes))) for _ in range(rounds)
        ]
        for nbytes in sizes
        for operation, calls in _calls(context, nbytes).items()
    }


def _calls(context: Context, nbytes: int) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """Return each collective with a copy of as many bytes, by operation; all collectives have run once."""
    accelerator, group = context.accelerator, context.group
    numel = nbytes // torch.bfloat16.itemsize // group.size * group.size
    full = torch.zeros(numel, dtype=torch.bfloat16, device=accelerator.device)
    other, shard = torch.ones_like(full), torch.zeros_like(full[: numel // group.size])
    collectives, counts = accelerator.collectives, [numel // group.size] * group.size
    calls: dict[str, Callable[[], Any]] = {
        "all_gather": lambda: collectives.all_gather(full, shard, group),
        "reduce_scatter": lambda: collectives.reduce_scatter(shard, full, group),
        "all_to_all": lambda: collectives.all_to_all(full, other, counts, counts, group),
        "all_reduce": lambda: collectives.all_reduce(full, group),
    }
    for call in calls.values():
        call()
    return {operation: (call, lambda: full.copy_(other)) for operation, call in calls.items()}


def _turn(
    context: Context, calls: tuple[Callable[[], Any], Callable[[], Any]], repeats: int
) -> tuple[float, float]:
    collective, copy = calls
    return _seconds(context, collective, repeats), _seconds(context, copy, repeats)


def _seconds(context: Context, call: Callable[[], Any], repeats: int) -> float:
    """Device seconds per call, measured from a barrier on."""
    stream = context.accelerator.streams.current()
    context.accelerator.streams.synchronize()
    context.accelerator.collectives.barrier(context.group)
    start = stream.record()
    for _ in range(repeats):
        call()
    return stream.record().seconds_since(start) / repeats


def _row(operation: str, nbytes: int, of_ranks: list[list[tuple[float, float]]]) -> dict[str, Any]:
    turns = [
        tuple(max(of_rank[i] for of_rank in turn) for i in (0, 1)) for turn in zip(*of_ranks, strict=True)
    ]
    seconds = median(collective for collective, _ in turns)
    return {
        "operation": operation,
        "bytes": nbytes,
        "median": seconds,
        "bytes_per_second": nbytes / seconds,
        "of_copy": median(collective / copy for collective, copy in turns),
    }
