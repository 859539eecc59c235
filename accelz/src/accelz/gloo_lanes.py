"""gloo collectives in lanes, so that ranks that disagree get an error instead of a crash.

When two ranks of a gloo group meet in collectives of different sizes, gloo's transport thread throws and
the process is gone. Here every (operation, bytes) of a group has a gloo context of its own, made at first
use; ranks that issue different collectives wait in different lanes, and each gets a CollectiveError when
the group's timeout passes.

For backends whose collectives run on host tensors: a CPU, or a device whose data is staged through the host.
"""

from __future__ import annotations

import atexit
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from accelz.collectives import Collectives, Group


class GlooLanes(Collectives):
    """The default collectives, with lanes for those whose size depends on the caller's path."""

    def __init__(self) -> None:
        super().__init__("gloo")
        self._lanes: dict[tuple[int, str, str, int], dist.ProcessGroupGloo] = {}
        self._jobs = 0  # a new job must not meet the addresses of an old one in the store

    def destroy(self) -> None:
        self._close_lanes()
        self._jobs += 1
        super().destroy()

    def _close_lanes(self) -> None:
        self._lanes.clear()

    def _start_all_gather(self, output: Tensor, shard: Tensor, group: Group) -> dist.Work:
        work: dist.Work = self._lane("all_gather", output, group)._allgather_base(output, shard)
        return work

    def _start_reduce_scatter(self, output: Tensor, full: Tensor, group: Group, op: Any) -> dist.Work:
        options = dist.ReduceScatterOptions()
        options.reduceOp = op
        lane = self._lane("reduce_scatter", full, group)
        work: dist.Work = lane._reduce_scatter_base(output, full, options)
        return work

    def _start_all_reduce(self, tensor: Tensor, group: Group, op: Any) -> dist.Work:
        options = dist.AllreduceOptions()
        options.reduceOp = op
        work: dist.Work = self._lane("all_reduce", tensor, group).allreduce([tensor], options)
        return work

    def _lane(self, operation: str, whole: Tensor, group: Group) -> Any:
        nbytes = whole.numel() * whole.element_size()
        key = (self._jobs, group.process_group.group_name, operation, nbytes)
        if not self._lanes:
            # A lane's thread that drops its last tensor while the interpreter goes down aborts the process.
            atexit.register(self._close_lanes)
        if key not in self._lanes:
            store = PrefixStore("accelz/{}/{}/{}/{}".format(*key), group.store)
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout = timedelta(seconds=group.timeout)
            options._threads = 1
            options._devices = [self._device]  # one transport thread for all lanes
            self._lanes[key] = dist.ProcessGroupGloo(store, group.rank, group.size, options)
        return self._lanes[key]

    @cached_property
    def _device(self) -> Any:
        return dist.ProcessGroupGloo.create_default_device()
