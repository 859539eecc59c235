"""How close flat-buffer kernels come to the bandwidth of a device copy, and what a launch costs the host."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import accelz
from accelz.bench.measure import Described, DeviceBench, rows
from benchmarks.job import Job
from benchmarks.result import Result


@dataclass(frozen=True)
class BandwidthOptions:
    """Options of the benchmark.

    elements: of every buffer; should be several times the device's cache. repeats: calls in a timed turn.
    limit: seconds that one call may take.
    """

    device: str = "cpu"
    elements: int = 1 << 24
    threads: int = 1
    rounds: int = 9
    repeats: int = 3
    limit: float = 120.0


class BandwidthRank:
    """All cases in one process on the device."""

    def __init__(self, device: str, elements: int) -> None:
        accelerator = accelz.use(device)
        accelerator.bind(0)
        self._bench = DeviceBench(accelerator, elements)

    def described(self) -> list[Described]:
        return Described.all(self._bench)

    def round(self, repeats: int) -> list[float]:
        return self._bench.round(repeats)

    def launches(self) -> list[float]:
        return self._bench.launches()


def run(options: BandwidthOptions) -> Result:
    """Time all kernels. Raises JobError if a kernel raises or takes too long."""
    service = (options.device, options.elements)
    with Job(BandwidthRank, service, 1, options.threads, options.limit) as job:
        described = job.call("described")[0]
        rounds = [job.call("round", options.repeats)[0] for _ in range(options.rounds)]
        launches = job.call("launches")[0]
    return Result("bandwidth", asdict(options), rows(described, options.elements, rounds, launches))
