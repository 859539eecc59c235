"""Measures in one process how long calls take on the device, and how long the host takes to start them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

from accelz.accelerator import Accelerator
from accelz.bench.cases import COPY, Case, cases
from accelz.errors import AccelzError
from accelz.roles import kernels

LAUNCH_ELEMENTS = 1024
LAUNCHES = 200


class DeviceBench:
    """All cases on buffers of `elements` elements, allocated and called once."""

    def __init__(self, accelerator: Accelerator, elements: int) -> None:
        self._accelerator = accelerator
        self.cases = tuple(cases(accelerator, elements))
        self._small = tuple(cases(accelerator, LAUNCH_ELEMENTS))
        for case in (*self.cases, *self._small):
            case.call()  # compiles, allocates
        accelerator.streams.synchronize()

    def origin(self, case: Case) -> str:
        """Return who implements the operation of a case."""
        known = case.operation in kernels.NAMES
        return self._accelerator.kernels.origin(case.operation) if known else "torch"

    def round(self, repeats: int) -> list[float]:
        """Return the device seconds per call of each case, measured one after another."""
        return [self._device_seconds(case.call, repeats) for case in self.cases]

    def launches(self) -> list[float]:
        """Return the host seconds to start a call of each case, on few elements."""
        return [self._host_seconds(case.call) for case in self._small]

    def _device_seconds(self, call: Callable[[], object], repeats: int) -> float:
        stream = self._accelerator.streams.current()
        call()
        start = stream.record()
        for _ in range(repeats):
            call()
        return stream.record().seconds_since(start) / repeats

    def _host_seconds(self, call: Callable[[], object]) -> float:
        self._accelerator.streams.synchronize()
        start = time.perf_counter()
        for _ in range(LAUNCHES):
            call()
        seconds = (time.perf_counter() - start) / LAUNCHES
        self._accelerator.streams.synchronize()
        return seconds


@dataclass(frozen=True)
class Described:
    """A case without its call, which cannot be sent to another process."""

    operation: str
    dtypes: str
    traffic: float
    origin: str

    @classmethod
    def all(cls, bench: DeviceBench) -> list[Described]:
        return [cls(c.operation, c.dtypes, c.traffic, bench.origin(c)) for c in bench.cases]


def rows(
    described: list[Described], elements: int, rounds: list[list[float]], launches: list[float]
) -> list[dict[str, Any]]:
    """Return medians over rounds, a row per case.

    bytes: per call. of_copy: the bandwidth as a fraction of that of a copy on the device in the same round.
    launch: host seconds.
    """
    copy = next(index for index, case in enumerate(described) if case.operation == COPY)
    rates = [[elements * c.traffic / s for c, s in zip(described, r, strict=True)] for r in rounds]
    return [
        {
            "kernel": case.operation,
            "dtypes": case.dtypes,
            "origin": case.origin,
            "bytes": round(elements * case.traffic),
            "median": median(r[index] for r in rounds),
            "bytes_per_second": median(r[index] for r in rates),
            "of_copy": median(r[index] / r[copy] for r in rates),
            "launch": launches[index],
        }
        for index, case in enumerate(described)
    ]


def measure(accelerator: Accelerator, elements: int, rounds: int, repeats: int = 3) -> list[dict[str, Any]]:
    """Measure this process's device and return its `rows`. Raises AccelzError if the buffers do not fit."""
    accelerator.bind(0)
    try:
        bench = DeviceBench(accelerator, elements)
    except RuntimeError as error:  # out of memory, mostly
        raise AccelzError(
            f"{accelerator.name!r} cannot be measured with {elements} elements: {error}"
        ) from error
    turns = [bench.round(repeats) for _ in range(rounds)]
    return rows(Described.all(bench), elements, turns, bench.launches())
