"""The collectives role, staged through the host: copy out, gloo, copy back when it is waited for.

For a device without a communication library of its own this is all it takes. One with a library registers
it with torch.distributed and passes the spec "cpu:gloo,sim:<library>" to `accelz.Collectives`, no more.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from accelz.collectives import Group
from accelz.gloo_lanes import GlooLanes
from accelz_sim import faults

Start = Callable[..., dist.Work]


class StagedWork(dist.Work):
    """gloo's work on host copies; `wait` also writes the result to the device, once."""

    def __init__(self, inner: dist.Work, host: Tensor, target: Tensor) -> None:
        super().__init__()
        self._inner = inner
        self._host = host
        self._target: Tensor | None = target

    def wait(self, timeout: Any = None) -> bool:
        if self._target is not None:
            self._inner.wait()
            self._target.copy_(self._host)
            self._target = None
        return True


class FaultyWork(dist.Work):
    """A collective that this rank never joins. seconds: until `wait` says so."""

    def __init__(self, name: str, seconds: float) -> None:
        super().__init__()
        self._name = name
        self._deadline = time.monotonic() + seconds

    def wait(self, timeout: Any = None) -> bool:
        time.sleep(max(0.0, self._deadline - time.monotonic()))
        raise RuntimeError(f"{self._name} failed: a fault that was switched on")


class HostStaged(GlooLanes):
    """gloo in lanes, on copies of device tensors; host tensors go as they are."""

    def _start_all_gather(self, output: Tensor, shard: Tensor, group: Group) -> dist.Work:
        return self._staged("all_gather", super()._start_all_gather, output, shard, group)

    def _start_reduce_scatter(self, output: Tensor, full: Tensor, group: Group, op: Any) -> dist.Work:
        return self._staged("reduce_scatter", super()._start_reduce_scatter, output, full, group, op)

    def _start_all_reduce(self, tensor: Tensor, group: Group, op: Any) -> dist.Work:
        return self._staged_in_place("all_reduce", super()._start_all_reduce, tensor, group, op)

    def _start_broadcast(self, tensor: Tensor, source: int, group: Group) -> dist.Work:
        start = super()._start_broadcast
        return self._staged_in_place("broadcast", lambda t, g: start(t, source, g), tensor, group)

    def _staged(
        self, name: str, start: Start, output: Tensor, source: Tensor, group: Group, *rest: Any
    ) -> dist.Work:
        if fault := _fault(name, group):
            return fault
        if output.device.type == "cpu":
            return start(output, source, group, *rest)
        host = output.new_empty(output.shape, device="cpu")
        return StagedWork(start(host, source.cpu(), group, *rest), host, output)

    def _staged_in_place(
        self, name: str, start: Start, tensor: Tensor, group: Group, *rest: Any
    ) -> dist.Work:
        if fault := _fault(name, group):
            return fault
        if tensor.device.type == "cpu":
            return start(tensor, group, *rest)
        host = tensor.cpu()
        return StagedWork(start(host, group, *rest), host, tensor)


def _fault(name: str, group: Group) -> dist.Work | None:
    kind = faults.next_collective()
    if kind is None:
        return None
    return FaultyWork(name, group.timeout if kind == "stalls" else 0.0)
