"""The collectives role: accelz's own, staged through the host, with faults that can be switched on.

A device without a communication library needs nothing but `HostStaged(host_collectives())`. A device with one
registers it with torch.distributed and uses `accelz.Collectives("cpu:gloo,sim:<library>")`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from accelz import CollectiveError, Group
from accelz.gloo import HostStaged
from accelz_sim import faults


class FaultyWork(dist.Work):
    """A collective that this rank never joins. seconds: the time until `wait` raises."""

    def __init__(self, name: str, seconds: float) -> None:
        super().__init__()
        self._name = name
        self._deadline = time.monotonic() + seconds

    def wait(self, timeout: Any = None) -> bool:
        time.sleep(max(0.0, self._deadline - time.monotonic()))
        raise RuntimeError(f"{self._name} failed: an injected fault")


class AbortedWork(dist.Work):
    """A collective that ends without doing anything."""

    def wait(self, timeout: Any = None) -> bool:
        return True


class SimCollectives(HostStaged):
    """Staged through the host, unless a fault hits."""

    def check(self, group: Group) -> None:
        if faults.collective_was_aborted():
            raise CollectiveError("a collective was aborted: an injected fault")

    def _start_all_gather(self, output: Tensor, shard: Tensor, group: Group) -> dist.Work:
        return _fault("all_gather", group) or super()._start_all_gather(output, shard, group)

    def _start_reduce_scatter(self, output: Tensor, full: Tensor, group: Group, op: Any) -> dist.Work:
        return _fault("reduce_scatter", group) or super()._start_reduce_scatter(output, full, group, op)

    def _start_all_to_all(
        self, output: Tensor, parts: Tensor, received: Sequence[int], sent: Sequence[int], group: Group
    ) -> dist.Work:
        return _fault("all_to_all", group) or super()._start_all_to_all(output, parts, received, sent, group)

    def _start_all_reduce(self, tensor: Tensor, group: Group, op: Any) -> dist.Work:
        return _fault("all_reduce", group) or super()._start_all_reduce(tensor, group, op)

    def _start_broadcast(self, tensor: Tensor, source: int, group: Group) -> dist.Work:
        return _fault("broadcast", group) or super()._start_broadcast(tensor, source, group)


def _fault(name: str, group: Group) -> dist.Work | None:
    kind = faults.next_collective()
    if kind is None:
        return None
    if kind == "is aborted":
        return AbortedWork()
    return FaultyWork(name, group.timeout if kind == "stalls" else 0.0)
