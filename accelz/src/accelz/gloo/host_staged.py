"""Collectives staged through the host, for a device without a communication library.

Copy out, a collective of host tensors, copy back: correct on any device, and as slow as its copies. Host
tensors are not copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from accelz.gloo.lanes import GlooLanes
from accelz.ranks.group import Group
from accelz.roles.collectives import Collectives
from accelz.roles.direct_exchange import FinishedOnWait


class HostStaged(Collectives):
    """Collectives of host copies of device tensors.

    host: those of host tensors, which do the work, gloo's in lanes by default. The best that there are come
    from `accelz.host_collectives()`: ranks of one machine share memory, in which a group can do nothing more
    after a collective that failed.
    """

    def __init__(self, host: Collectives | None = None) -> None:
        self._host = host or GlooLanes()
        super().__init__(self._host.spec, self._host.member_groups)

    def _group_spec(self) -> str:
        return self._host._group_spec()

    def check(self, group: Group) -> None:
        self._host.check(group)

    def destroy(self) -> None:
        self._host.destroy()

    def _start_all_gather(self, output: Tensor, shard: Tensor, group: Group) -> dist.Work:
        start = self._host._start_all_gather
        return _staged(output, shard, lambda there, here: start(there, here, group))

    def _start_reduce_scatter(self, output: Tensor, full: Tensor, group: Group, op: Any) -> dist.Work:
        start = self._host._start_reduce_scatter
        return _staged(output, full, lambda there, here: start(there, here, group, op))

    def _start_all_to_all(
        self, output: Tensor, parts: Tensor, received: Sequence[int], sent: Sequence[int], group: Group
    ) -> dist.Work:
        start = self._host._start_all_to_all
        return _staged(output, parts, lambda there, here: start(there, here, received, sent, group))

    def _start_all_reduce(self, tensor: Tensor, group: Group, op: Any) -> dist.Work:
        return _staged(tensor, tensor, lambda _, here: self._host._start_all_reduce(here, group, op))

    def _start_broadcast(self, tensor: Tensor, source: int, group: Group) -> dist.Work:
        return _staged(tensor, tensor, lambda _, here: self._host._start_broadcast(here, source, group))


def _staged(output: Tensor, given: Tensor, start: Callable[[Tensor, Tensor], dist.Work]) -> dist.Work:
    """Start a collective on the host, from a copy of `given`, for `output`. Both may be one tensor."""
    if output.device.type == "cpu":
        return start(output, given)
    here = given.cpu()
    there = here if output is given else output.new_empty(output.shape, device="cpu")

    def finish(_: Tensor = here) -> None:  # which must be there until the collective has read it
        output.copy_(there)

    return FinishedOnWait(start(there, here), finish)
