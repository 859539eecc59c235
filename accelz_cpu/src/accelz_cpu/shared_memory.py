"""Collectives through memory that the ranks of one host share; gloo between hosts.

Sums of 16-bit values are made in fp32, in rank order, and rounded once; max and min keep NaN. Results are the
same bits on all ranks and in all runs. Movements (all_gather, broadcast) and reductions (reduce_scatter,
all_reduce) are two sequences: in each, ranks that issue different collectives get an error that names both.
"""

from __future__ import annotations

import atexit
from ctypes import CDLL
from typing import Any

import torch.distributed as dist
from torch import Tensor

from accelz.collectives import Group
from accelz.gloo_lanes import GlooLanes
from accelz_cpu.channel import ALL_GATHER, ALL_REDUCE, BROADCAST, REDUCE_SCATTER, Channel
from accelz_cpu.common_memory import CommonMemory
from accelz_cpu.native import DTYPES
from accelz_cpu.rendezvous import open_channel

_REDUCTIONS = {dist.ReduceOp.SUM: 0, dist.ReduceOp.MAX: 1, dist.ReduceOp.MIN: 2}


class SharedMemoryCollectives(GlooLanes):
    """Shared memory where all ranks of a group have one host, gloo elsewhere and for dtypes it cannot sum."""

    def __init__(self, library: CDLL, memory: CommonMemory) -> None:
        super().__init__()
        self._library = library
        self._memory = memory
        self._channels: dict[dist.ProcessGroup, Channel | None] = {}

    def channel(self, group: Group) -> Channel | None:
        """The group's channel, or None where it uses gloo. At first use every rank of the group must ask."""
        process_group = group.process_group
        if process_group not in self._channels:
            if not self._channels:
                atexit.register(self._close_channels)  # the others may not have read the last collective yet
            key = f"accelz_cpu/{self._jobs}/{process_group.group_name}"
            self._channels[process_group] = open_channel(self._library, group, key)
        return self._channels[process_group]

    def destroy(self) -> None:
        self._close_channels()
        super().destroy()

    def _close_channels(self) -> None:
        channels = list(self._channels.values())
        self._channels.clear()
        for channel in channels:
            if channel is not None:
                channel.close()

    def _start_all_gather(self, output: Tensor, shard: Tensor, group: Group) -> dist.Work:
        channel = self.channel(group)
        if channel is None:
            return super()._start_all_gather(output, shard, group)
        _check_dense(output, shard)
        source = None if self._memory.has_in_place(output, shard, group) else shard
        return channel.start(ALL_GATHER, output, source, shard.numel(), group.timeout)

    def _start_broadcast(self, tensor: Tensor, source: int, group: Group) -> dist.Work:
        channel = self.channel(group)
        if channel is None:
            return super()._start_broadcast(tensor, source, group)
        _check_dense(tensor)
        return channel.start(BROADCAST, tensor, tensor, tensor.numel(), group.timeout, root=source)

    def _start_reduce_scatter(self, output: Tensor, full: Tensor, group: Group, op: Any) -> dist.Work:
        channel = self.channel(group)
        if channel is None or full.dtype not in DTYPES:
            return super()._start_reduce_scatter(output, full, group, op)
        _check_dense(output, full)
        return channel.start(REDUCE_SCATTER, output, full, output.numel(), group.timeout, _REDUCTIONS[op])

    def _start_all_reduce(self, tensor: Tensor, group: Group, op: Any) -> dist.Work:
        channel = self.channel(group)
        if channel is None or tensor.dtype not in DTYPES:
            return super()._start_all_reduce(tensor, group, op)
        _check_dense(tensor)
        return channel.start(ALL_REDUCE, tensor, tensor, tensor.numel(), group.timeout, _REDUCTIONS[op])


def _check_dense(*tensors: Tensor) -> None:
    for tensor in tensors:
        if not (tensor.is_cpu and tensor.is_contiguous()):
            raise ValueError(
                f"expected contiguous tensors in host memory, got shape {tuple(tensor.shape)} with strides "
                f"{tensor.stride()} on {tensor.device}: pass .contiguous()"
            )
