"""What tests of ranks that fail or differ share."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from accelz.conformance.cluster import Cluster, Outcome

Ranks = Callable[[int], Cluster]
TIMEOUT = 4.0  # seconds; a busy machine needs one or two to form the groups


class Reordered(nn.Module):
    """Equal blocks, called in an order of its own on each rank."""

    def __init__(self, order: list[int]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = self.blocks[index](x)
        return x


@dataclass(frozen=True)
class Job:
    """A body for ranks of its own."""

    size: int
    body: Callable[..., Any]
    arguments: dict[str, Any] = field(default_factory=dict)


def ended_jobs(device: str, jobs: dict[str, Job], together: bool) -> dict[str, list[Outcome]]:
    """How jobs end, by name and rank. together: run them at the same time, so that they wait together for
    what takes its time, such as a timeout; needs a device that several ranks may use."""
    ranks = {name: Cluster(device, job.size) for name, job in jobs.items()}

    def outcomes(name: str) -> list[Outcome]:
        return ranks[name].outcomes(jobs[name].body, limit=40, **jobs[name].arguments)

    try:
        for each in ranks.values() if together else ():
            each.start()
        with ThreadPoolExecutor(len(jobs) if together else 1) as threads:
            return dict(zip(jobs, threads.map(outcomes, jobs), strict=True))
    finally:
        for each in ranks.values():
            each.stop()
