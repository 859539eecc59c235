"""Collectives through memory that the ranks of one host share; gloo joins the hosts.

16-bit values are summed in fp32, in rank order, and rounded once (on several hosts: see hierarchy.py). max
and min keep NaN. Results are the same bits on all ranks and in all runs. Movements (all_gather, all_to_all,
broadcast) and reductions (reduce_scatter, all_reduce) are two sequences: within each, ranks of a host that
issue different collectives get an error that names both.
"""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from ctypes import CDLL
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accelz import Group
from accelz.gloo import GlooLanes
from accelz_cpu.channel import MAX, MIN, SUM, Channel
from accelz_cpu.common_memory import CommonMemory
from accelz_cpu.native import DTYPES
from accelz_cpu.rendezvous import open_transport
from accelz_cpu.transport import Transport

_REDUCTIONS = {dist.ReduceOp.SUM: SUM, dist.ReduceOp.MAX: MAX, dist.ReduceOp.MIN: MIN}


class SharedMemoryCollectives(GlooLanes):
    """Collectives through shared memory where possible.

    The whole group uses gloo if its hosts differ in their number of ranks or have one each, if memory cannot
    be shared, for reductions of dtypes that the library cannot sum, and for all_to_all between hosts.
    """

    def __init__(self, library: CDLL, memory: CommonMemory) -> None:
        super().__init__()
        self._library = library
        self._memory = memory
        self._transports: dict[dist.ProcessGroup, Transport | None] = {}
        self._opening: dict[dist.ProcessGroup, Lock] = {}

    def transport(self, group: Group) -> Transport | None:
        """Return the group's transport, or None if it uses gloo. At first use every rank must call this."""
        process_group = group.process_group
        if process_group not in self._transports:
            with self._opening.setdefault(process_group, Lock()):  # a thread may move, while another reduces
                if process_group not in self._transports:
                    self._open(group)
        return self._transports[process_group]

    def _open(self, group: Group) -> None:
        if not self._transports:
            atexit.register(self._close_transports)  # others may not have read the last collective yet
        self._transports[group.process_group] = open_transport(self._library, group)

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device, group: Group) -> Tensor:
        """Shared memory, where all ranks of a connected group are on one host; it is not a forked child's."""
        transport = self._transports.get(group.process_group)  # opened by `connect`: not here, by some ranks
        shared = transport.empty(numel, dtype) if isinstance(transport, Channel) else None
        return super().empty(numel, dtype, device, group) if shared is None else shared

    def destroy(self) -> None:
        self._close_transports()
        super().destroy()

    def _close_transports(self) -> None:
        transports = list(self._transports.values())
        self._transports.clear()
        self._opening.clear()
        for transport in transports:
            if transport is not None:
                transport.close()

    def _start_all_gather(self, output: Tensor, shard: Tensor, group: Group) -> dist.Work:
        transport = self.transport(group)
        if transport is None:
            return super()._start_all_gather(output, shard, group)
        _check_dense(output, shard)
        in_place = self._memory.has_in_place(output, shard, group)
        return transport.all_gather(output, shard, group.timeout, in_place)

    def _start_broadcast(self, tensor: Tensor, source: int, group: Group) -> dist.Work:
        transport = self.transport(group)
        if transport is None:
            return super()._start_broadcast(tensor, source, group)
        _check_dense(tensor)
        return transport.broadcast(tensor, source, group.timeout)

    def _start_reduce_scatter(self, output: Tensor, full: Tensor, group: Group, op: Any) -> dist.Work:
        transport = self.transport(group)
        if transport is None or full.dtype not in DTYPES:
            return super()._start_reduce_scatter(output, full, group, op)
        _check_dense(output, full)
        return transport.reduce_scatter(output, full, group.timeout, _REDUCTIONS[op])

    def _start_all_to_all(
        self, output: Tensor, parts: Tensor, received: Sequence[int], sent: Sequence[int], group: Group
    ) -> dist.Work:
        transport = self.transport(group)
        if not isinstance(transport, Channel):
            return super()._start_all_to_all(output, parts, received, sent, group)
        _check_dense(output, parts)
        return transport.all_to_all(output, parts, received, sent, group.timeout)

    def _start_all_reduce(self, tensor: Tensor, group: Group, op: Any) -> dist.Work:
        transport = self.transport(group)
        if transport is None or tensor.dtype not in DTYPES:
            return super()._start_all_reduce(tensor, group, op)
        _check_dense(tensor)
        return transport.all_reduce(tensor, group.timeout, _REDUCTIONS[op])


def _check_dense(*tensors: Tensor) -> None:
    for tensor in tensors:
        if not (tensor.is_cpu and tensor.is_contiguous()):
            raise ValueError(
                f"expected contiguous tensors in host memory, got shape {tuple(tensor.shape)} with strides "
                f"{tensor.stride()} on {tensor.device}: pass .contiguous()"
            )
