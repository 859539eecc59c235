"""This rank's slice of a group's reduced gradient, in its tier: the *sum* over ranks and micro-batches.

On the device it is what the reduction left, at best a part of the buffer that was reduced. In any other tier
it leaves the device at once, and its memory there is free once it has landed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from accelz import HOST, Kernels
from zero.sharding.flat_group import FlatGroup
from zero.tiers.carrier import HostCopy
from zero.tiers.stores import Stores
from zero.tiers.values import Values, at_least_fp32


class ReducedSlice:
    """(shard_numel,), 16-bit or fp32.

    widen: whether 16-bit values are kept in fp32 from the first, because others will be added. widest: the
    dtype that it has at most; on disk, its place is allocated at once. dtype: that of the last gradient.
    """

    def __init__(self, group: FlatGroup, stores: Stores, widen: bool, widest: torch.dtype) -> None:
        self.dtype: torch.dtype | None = None
        self._group = group
        self._stores = stores
        self._widen = widen
        self._values: Values | None = None
        self._place = group.placement.gradients.place(stores, group.layout.shard_numel, widest)
        self._host_copy: HostCopy | None = None  # on its way, not yet added

    @property
    def present(self) -> bool:
        """Whether there is a gradient."""
        return self._host_copy is not None or self._values is not None

    @property
    def away(self) -> bool:
        """Whether there is a gradient that takes no memory of the device."""
        if self._host_copy is not None:
            return self._host_copy.event.done()
        return self._values is not None and not self._is_near

    def find(self) -> Values | None:
        """The gradient, or None if there is none; waits for one that is on its way."""
        if self._host_copy is not None:
            self._fold(self._host_copy.wait())
            self._host_copy = None
        return self._values

    def get(self) -> Values:
        """The gradient of a group that has one."""
        values = self.find()
        assert values is not None
        return values

    @property
    def near(self) -> Tensor:
        """The gradient of a group whose gradients are on the device."""
        values = self.get()
        assert isinstance(values, Tensor)
        return values

    def add(self, slice_: Tensor) -> None:
        """Add the slice that a micro-batch left on the device. The caller drops it."""
        if self._group.placement.gradients.near:
            self._fold(slice_)
            return
        self.find()  # the previous one has had a whole micro-batch to land
        if slice_.device == HOST:
            self._fold(slice_)
        else:
            self._host_copy = self._stores.carrier.to_host(slice_)
            if self._group.placement.gradients.stored:
                self.find()  # host memory is short too

    def is_in(self, buffer: Tensor) -> bool:
        """Whether the slice is the whole of `buffer`."""
        return self._values is buffer

    def device_bytes(self) -> int:
        """Bytes of the device in use, including those of a gradient on its way to the host."""
        if self._host_copy is not None:
            return 0 if self._host_copy.event.done() else self._host_copy.values.nbytes
        values = self._values
        return values.numel() * values.element_size() if values is not None and self._is_near else 0

    def clear(self) -> None:
        """Drop the gradient."""
        if self._host_copy is not None:
            self._host_copy.wait()
            self._host_copy = None
        self._values = None

    @property
    def _is_near(self) -> bool:
        values = self._values
        return isinstance(values, Tensor) and values.device == self._stores.accelerator.device

    def _fold(self, slice_: Tensor) -> None:
        if self._values is not None:
            kernels = self._stores.kernels(slice_.device)
            slice_ = added(self._values.to(slice_.device), slice_, kernels)
        elif self._widen and slice_.dtype.itemsize < 4:
            slice_ = slice_.float()
        if self._place is not None:
            self._place.write(slice_)
        self._values = slice_ if self._place is None else self._place
        self.dtype = self._values.dtype


def added(sum_: Tensor, values: Tensor, kernels: Kernels) -> Tensor:
    """Add to a sum, in place unless it has 16 bits: sums have at least fp32."""
    sum_ = sum_.to(at_least_fp32(sum_.dtype))
    kernels.accumulate(sum_, values)
    return sum_
