"""Sums of reduced slices over several replicas of the model, between the ranks that hold the same slice.

A slice that stays on the device is summed once per optimizer step, after the micro-batches have been added up
in it (two hops; MiCS, Zhang et al., 2022). A slice that leaves the device, or may have to, is summed before
it leaves, every time. Either way the sum overlaps the backward of the units that follow.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from torch import Tensor

from accelz import FlatBuffer
from zero.communication.communicator import Communicator, NamedHandle
from zero.gradients.group_gradients import GroupGradients

REPLICA_SUMS_IN_FLIGHT = 2  # units whose slices may be under way; with one more, the oldest is waited for


@dataclass
class _Sum:
    """slice_: added to the gradients once it is the sum over replicas; None where the gradients' own slice is
    summed in place. whole: the buffer that it lives in, if it does."""

    gradients: GroupGradients
    slice_: Tensor | None
    whole: FlatBuffer | None
    handle: NamedHandle


class ReplicaSums:
    """Slices under way between the replicas."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._flying: deque[_Sum] = deque()

    def take(self, gradients: GroupGradients, whole: FlatBuffer, slice_: Tensor, last: bool) -> None:
        """Take over a slice that was reduced from `whole` over the ranks of this copy; all of it where a rank
        has a copy for itself. last: whether it is of the last micro-batch."""
        under = whole if slice_ is whole.data else None
        if under is None:
            gradients.release_whole(whole)
        if gradients.two_hops and not gradients.total:
            gradients.store_reduced(under, slice_)
            if last:
                gradients.keep_slice()
                gradients.total = True
                self._start(gradients, gradients.slice.near)
        else:
            gradients.add_to_kept_slice(slice_)
            self._start(gradients, slice_, slice_, under)

    def finish(self) -> None:
        """Wait for everything that is under way."""
        while self._flying:
            self._wait_oldest()

    def clear(self) -> None:
        """Forget everything that is under way: nothing writes to slices any more."""
        for sum_ in self._flying:
            sum_.handle.wait()
        self._flying.clear()

    def device_bytes(self) -> int:
        """Bytes of the device in use for slices under way and for nothing else."""
        return sum(sum_.slice_.nbytes for sum_ in self._flying if sum_.slice_ is not None)

    def of_all(self, gradients: GroupGradients) -> Tensor | None:
        """Collective. A copy of the slice, summed over the replicas of the model; None where the slice itself
        is already that sum."""
        if not gradients.two_hops or gradients.total:
            return None
        value = gradients.slice.near.clone()
        self._sum(gradients, value).wait()
        return value

    def _start(
        self,
        gradients: GroupGradients,
        values: Tensor,
        slice_: Tensor | None = None,
        whole: FlatBuffer | None = None,
    ) -> None:
        self._flying.append(_Sum(gradients, slice_, whole, self._sum(gradients, values)))
        while len({sum_.gradients.unit for sum_ in self._flying}) > REPLICA_SUMS_IN_FLIGHT:
            self._wait_oldest()

    def _sum(self, gradients: GroupGradients, values: Tensor) -> NamedHandle:
        replicas = gradients.group.mesh.replicas
        assert replicas is not None
        return self._communicator.all_reduce(gradients.unit.name, values, replicas)

    def _wait_oldest(self) -> None:
        sum_ = self._flying.popleft()
        sum_.handle.wait()
        if sum_.slice_ is not None:
            with self._communicator.postponing_disk_errors():
                sum_.gradients.store_reduced(sum_.whole, sum_.slice_)
