"""Collectives staged through the host, for a device without a communication library.

Copy out, gloo, copy back: correct on any device, and as slow as its copies. Host tensors are not copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from accelz.gloo.lanes import GlooLanes
from accelz.ranks.group import Group
from accelz.roles.direct_exchange import FinishedOnWait


class HostStaged(GlooLanes):
    """gloo in lanes, on host copies of device tensors."""

    def _start_all_gather(self, output: Tensor, shard: Tensor, group: Group) -> dist.Work:
        start = super()._start_all_gather
        return _staged(output, lambda host: start(host, shard.cpu(), group), filled=False)

    def _start_reduce_scatter(self, output: Tensor, full: Tensor, group: Group, op: Any) -> dist.Work:
        start = super()._start_reduce_scatter
        return _staged(output, lambda host: start(host, full.cpu(), group, op), filled=False)

    def _start_all_to_all(
        self, output: Tensor, parts: Tensor, received: Sequence[int], sent: Sequence[int], group: Group
    ) -> dist.Work:
        start = super()._start_all_to_all
        return _staged(output, lambda host: start(host, parts.cpu(), received, sent, group), filled=False)

    def _start_all_reduce(self, tensor: Tensor, group: Group, op: Any) -> dist.Work:
        start = super()._start_all_reduce
        return _staged(tensor, lambda host: start(host, group, op), filled=True)

    def _start_broadcast(self, tensor: Tensor, source: int, group: Group) -> dist.Work:
        start = super()._start_broadcast
        return _staged(tensor, lambda host: start(host, source, group), filled=True)


def _staged(target: Tensor, start: Callable[[Tensor], dist.Work], filled: bool) -> dist.Work:
    """Start a collective on a host copy of `target`. filled: whether it reads what is in `target`."""
    if target.device.type == "cpu":
        return start(target)
    host = target.cpu() if filled else target.new_empty(target.shape, device="cpu")
    return FinishedOnWait(start(host), lambda: target.copy_(host))
