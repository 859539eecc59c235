"""What tests of ranks that fail or differ share."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
from torch import Tensor, nn

from accelz.conformance.cluster import Cluster, Clusters, Outcome

Ranks = Callable[[int], Cluster]
TIMEOUT = 4.0  # seconds; a busy machine needs one or two to form the groups
TOGETHER = 2  # jobs at a time, which must be able to form their groups in that


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
    """A body for ranks of its own. timeout: seconds, of the group that the ranks begin with."""

    size: int
    body: Callable[..., Any]
    arguments: dict[str, Any] = field(default_factory=dict)
    timeout: float = 20.0


class Ended(dict[str, list[Outcome]]):
    """How jobs have ended, by name and rank."""

    def __missing__(self, name: str) -> list[Outcome]:
        pytest.skip(f"{name}: more ranks than --max-ranks")

    def values_of(self, name: str) -> list[Any]:
        """What the ranks of a job have returned, which all must have."""
        assert all(each.status == "returned" for each in self[name]), self[name]
        return [each.value for each in self[name]]


def ended_jobs(clusters: Clusters, jobs: dict[str, Job], together: bool) -> Ended:
    """How those of the jobs end that may have so many ranks. together: run some at the same time, so that
    they wait together for what takes its time, such as a timeout; needs a device that several ranks may
    use."""

    def outcomes(name: str) -> list[Outcome]:
        ranks = Cluster(clusters.device, jobs[name].size, jobs[name].timeout)
        try:
            return ranks.outcomes(jobs[name].body, limit=40, **jobs[name].arguments)
        finally:
            ranks.stop()

    few = [name for name, job in jobs.items() if _may_have(clusters, job.size)]
    with ThreadPoolExecutor(TOGETHER if together else 1) as threads:
        return Ended(zip(few, threads.map(outcomes, few), strict=True))


def _may_have(clusters: Clusters, ranks: int) -> bool:
    try:
        clusters(ranks)
    except pytest.skip.Exception:
        return False
    return True
