"""One group's gradients while backward runs: a whole flat buffer, and which parameters' gradients are in
it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from accelz import FlatBuffer, Slot
from zero.config.training import DTYPES, Config
from zero.gradients.reduced_slice import ReducedSlice
from zero.sharding.flat_group import FlatGroup
from zero.sharding.sharded_unit import ShardedUnit
from zero.tiers.room import allocate
from zero.tiers.stores import Stores
from zero.tiers.values import at_least_fp32

T = TypeVar("T")


@dataclass(frozen=True)
class GradientPolicy:
    """When gradients are communicated, and in what dtypes.

    sums: whether several micro-batches may be added up for an optimizer step. local: whether ranks
    communicate only at the last of them.
    reduce_dtype: dtype that gradients travel in; None: the one that they are computed in, or added up in on
    this rank. fixed_tiers: whether gradients stay in the tier that they are placed in; otherwise a rank may
    move its own elsewhere.
    """

    sums: bool
    local: bool
    reduce_dtype: torch.dtype | None
    fixed_tiers: bool

    @classmethod
    def of(cls, config: Config, world_size: int) -> GradientPolicy:
        """The policy that the settings ask for. world_size: of the job or of a copy; it only matters whether
        a rank is alone."""
        return cls(
            sums=config.gradient_accumulation_steps != 1,
            local=config.accumulate == "local" or config.stage == 1 or world_size == 1,
            reduce_dtype=DTYPES[config.reduce_dtype] if config.reduce_dtype and world_size > 1 else None,
            fixed_tiers=not config.offload.measured,
        )

    def whole_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of the whole buffer for gradients in `dtype`: sums of micro-batches are at least fp32."""
        if self.local and self.sums:
            return at_least_fp32(dtype)
        return self.reduce_dtype or dtype

    def slice_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of the reduced slice of gradients in `dtype`: sums of micro-batches are at least fp32."""
        sent = self.reduce_dtype or self.whole_dtype(dtype)
        return at_least_fp32(sent) if self.sums else sent


class GroupGradients:
    """The gradients of one trainable group. slice: what is left of them once they are reduced.

    fired: parameters whose gradient has come in this backward, or in its present round. closed: whether no
        more will come in it.
    whole: the buffer that is being filled. filled: parameters that have a value in it.
    reduced: whether it has been handed to a reduction in this backward.
    locally_used: parameters that got a gradient on this rank since the last agreement. used: those that got
        one on any rank since the last step.
    two_hops: with several replicas of the model, whether slices are added up over them once per optimizer
        step, rather than each time a micro-batch leaves one; the same on all ranks. total: whether the slice
        is now the sum over all replicas; set by `ReplicaSums`.
    """

    def __init__(self, group: FlatGroup, unit: ShardedUnit, stores: Stores, policy: GradientPolicy) -> None:
        self.group = group
        self.unit = unit
        self.slice = ReducedSlice(group, stores, policy.sums, policy.slice_dtype(group.dtype))
        self.fired: set[int] = set()
        self.closed = False
        self.filled: set[int] = set()
        self.locally_used: set[int] = set()
        self.used: set[int] = set()
        self.reduced = False
        self.two_hops = policy.fixed_tiers and group.placement.gradients.near
        self.total = False
        self.whole: FlatBuffer | None = None
        self._stores = stores
        self._accelerator = stores.accelerator
        self._policy = policy
        self._buffers: dict[torch.dtype, FlatBuffer] = {}  # released, kept for their views
        self._under_slice: list[FlatBuffer] = []  # whole buffers in which the slice lives, until clear()
        self._gradient_dtype = group.dtype
        self._count = len(group.parameters)

    @property
    def full(self) -> bool:
        """Whether every parameter's gradient has come in this backward."""
        return len(self.fired) == self._count

    @property
    def partial(self) -> bool:
        """Whether some parameter has had no gradient on this rank."""
        return len(self.locally_used) < self._count

    def add(self, index: int, gradient: Tensor) -> None:
        """Put the gradient of parameter `index` into the whole buffer, or add it to the one that is there."""
        self.fired.add(index)
        self.locally_used.add(index)
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        self._gradient_dtype = gradient.dtype
        whole = self._open()
        if index in self.filled:
            slot = whole.slots[index]
            place = whole.data[slot.offset : slot.offset + slot.numel]
            self._accelerator.kernels.accumulate(place, _flat(gradient, slot))
        else:
            whole.views[index].copy_(gradient)
            self.filled.add(index)

    def _open(self) -> FlatBuffer:
        """The whole buffer, made if there is none; the first gradient decides its dtype."""
        if self.whole is None:
            dtype = self._policy.whole_dtype(self._gradient_dtype)
            self.whole = self.allocate(self.group.layout.numel * dtype.itemsize, lambda: self._buffer(dtype))
        return self.whole

    def allocate(self, nbytes: int, allocation: Callable[[], T]) -> T:
        """Return what `allocation` returns; an error for lack of memory names the unit."""
        return allocate(self._stores, "for gradients of", self.group.unit, nbytes, allocation)

    def empty_slice(self, dtype: torch.dtype) -> Tensor:
        """Room on the device for the reduced slice."""
        numel, device = self.group.layout.shard_numel, self._accelerator.device
        return self.allocate(numel * dtype.itemsize, lambda: torch.empty(numel, dtype=dtype, device=device))

    def seal(self) -> Tensor:
        """Make the whole buffer ready to be reduced: zero wherever no gradient came. Where none came at all,
        it gets the dtype that other ranks' gradients have."""
        if self.whole is None:
            self._gradient_dtype = self._computed_dtype()
        whole = self._open()
        for index in range(self._count):
            if index not in self.filled:
                whole.views[index].zero_()
        for gap in self.group.layout.gaps:
            whole.data[gap].zero_()
        return whole.data

    def store_reduced(self, whole: FlatBuffer, slice_: Tensor) -> None:
        """Add a reduced slice. `whole` is released unless the slice lives in it."""
        self.slice.add(slice_)
        if self.slice.is_in(whole.data):
            self._under_slice.append(whole)
        else:
            self.release_whole(whole)

    def detach_whole(self) -> FlatBuffer:
        """Hand the sealed buffer to a reduction, in the dtype that it travels in. Gradients that come later
        start a new one."""
        assert self.whole is not None
        whole, self.whole = self._narrowed(self.whole), None
        self.filled.clear()
        self.reduced = True
        return whole

    def _narrowed(self, whole: FlatBuffer) -> FlatBuffer:
        dtype = self._policy.reduce_dtype
        if dtype is None or whole.data.dtype is dtype:
            return whole
        nbytes = whole.data.numel() * dtype.itemsize
        narrow = self.allocate(nbytes, lambda: self._buffer(dtype))
        narrow.data.copy_(whole.data)
        self.release_whole(whole)
        return narrow

    def device_bytes(self) -> int:
        """Bytes of the device in use; a slice that lives in a whole buffer counts as that."""
        held = sum(whole.nbytes for whole in (self.whole, *self._under_slice) if whole is not None)
        return held + (0 if self._under_slice else self.slice.device_bytes())

    @property
    def slice_bytes(self) -> int:
        """Bytes that the reduced slice takes."""
        return self.group.layout.shard_numel * self._policy.slice_dtype(self._gradient_dtype).itemsize

    def begin_backward(self) -> None:
        self.fired.clear()
        self.closed = False
        self.reduced = False

    def begin_round(self) -> None:
        """The group will be complete once more in this backward."""
        self.fired = set(self.filled)
        self.closed = False

    def clear(self) -> None:
        """Forget everything of this optimizer step."""
        self.slice.clear()
        for whole in (*self._under_slice, *([self.whole] if self.whole is not None else [])):
            self.release_whole(whole)
        self._under_slice.clear()
        self.whole = None
        self.total = False
        self.begin_backward()
        self.filled.clear()
        self.locally_used.clear()
        self.used.clear()

    def forget(self, index: int) -> None:
        """Parameter `index` has no gradient any more. What is left of it in the slice is to be made zero."""
        for known in (self.filled, self.locally_used, self.used):
            known.discard(index)

    def zero_unreduced(self, index: int) -> None:
        """Make what has not been reduced of a parameter's gradient zero."""
        if self.whole is not None and index in self.filled:
            self.whole.views[index].zero_()

    def release_whole(self, whole: FlatBuffer) -> None:
        """Release a whole buffer that has been reduced, so that other gradients can use it."""
        whole.release()
        self._buffers.setdefault(whole.data.dtype, whole)

    def _computed_dtype(self) -> torch.dtype:
        """The dtype that the parameters were computed in, and so the dtype of their gradients."""
        cast = None if self.unit.resident else self.group.gather_format(self.unit.computed_in).dtype
        return cast or self.group.dtype

    def _buffer(self, dtype: torch.dtype) -> FlatBuffer:
        known = self._buffers.pop(dtype, None)
        if known is not None:
            known.materialize()
            return known
        layout = self.group.layout
        data = torch.empty(layout.numel, dtype=dtype, device=self._accelerator.device)
        return FlatBuffer(data, (), layout.slots)


def _flat(gradient: Tensor, slot: Slot) -> Tensor:
    """The gradient as (n,), in the memory order of the slot, because kernels take flat tensors. Copied only
    where strides differ."""
    if gradient.stride() != slot.stride:
        gradient = gradient.new_empty_strided(slot.shape, slot.stride).copy_(gradient)
    return gradient.as_strided((slot.numel,), (1,))
