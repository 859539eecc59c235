"""One group's gradients while backward runs: a whole flat buffer, and which parameters' gradients are in
it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from accelz import HOST, FlatBuffer, Slot
from zero.config.training import DTYPES, Config
from zero.gradients.reduced_slice import ReducedSlice, added
from zero.sharding.flat_group import FlatGroup
from zero.sharding.sharded_unit import ShardedUnit
from zero.tiers.device_bytes import held_bytes
from zero.tiers.room import allocate
from zero.tiers.stores import Stores
from zero.tiers.values import Values, at_least_fp32

T = TypeVar("T")


@dataclass(frozen=True)
class GradientPolicy:
    """When gradients are communicated, and in what dtypes.

    sums: whether several micro-batches are known to be added up for an optimizer step. open: whether nobody
    knows how many: any backward may be the last, and another may follow it.
    local: whether ranks communicate only at the last of them, or at any that may be it. keeps_whole: whether
    whole buffers stay after that, for others to be added on this rank and reduced anew.
    reduce_dtype: dtype that gradients travel in; None: the one that they are computed in, or added up in on
    this rank. fixed_tiers: whether gradients stay in the tier that they are placed in; otherwise a rank may
    move its own elsewhere. stays: whether the memory of a reduced slice stays from one step to the next, so
    that a captured step finds the slice where it was.
    """

    sums: bool
    open: bool
    local: bool
    keeps_whole: bool
    reduce_dtype: torch.dtype | None
    fixed_tiers: bool
    stays: bool

    @classmethod
    def of(cls, config: Config, world_size: int) -> GradientPolicy:
        """The policy that the settings ask for. world_size: of the job or of a copy; it only matters whether
        a rank is alone."""
        count = config.gradient_accumulation_steps
        local = config.accumulate == "local" or config.stage == 1 or world_size == 1
        return cls(
            sums=count is not None and count > 1,
            open=count is None,
            local=local,
            keeps_whole=count is None and local and world_size > 1,  # one rank can add to what it has reduced
            reduce_dtype=DTYPES[config.reduce_dtype] if config.reduce_dtype and world_size > 1 else None,
            fixed_tiers=not config.offload.measured,
            stays=config.capture_step,
        )

    def whole_dtype(self, dtype: torch.dtype, adds: bool) -> torch.dtype:
        """The dtype of the whole buffer for gradients in `dtype`: sums of micro-batches are at least fp32.
        adds: whether those of several backwards, if any, are added up on this rank."""
        if self.local and adds:
            return at_least_fp32(dtype)
        if self.keeps_whole and self.reduce_dtype is not None:
            return torch.promote_types(dtype, self.reduce_dtype)  # rounded only on its way
        return self.reduce_dtype or dtype

    def slice_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of the reduced slice of gradients in `dtype`: sums of micro-batches are at least fp32.
        Until there is a second one, a micro-batch is taken for the only one."""
        sent = self.reduce_dtype or self.whole_dtype(dtype, self.sums)
        return at_least_fp32(sent) if self.sums else sent

    def place_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of the place on disk for the reduced slice, which it has whatever comes."""
        slice_ = self.slice_dtype(dtype)
        return at_least_fp32(slice_) if self.open else slice_


class GroupGradients:
    """The gradients of one trainable group. slice: what is left of them once they are reduced.

    fired: parameters whose gradient has come in this backward, or in its present round. closed: whether no
        more will come in it.
    whole: the buffer that is being filled. filled: parameters that have a value in it.
    A step may take any number of backwards, as `policy.open` says. What another one adds to is then kept
    beside the slice, as it was before its reduction: the whole buffer, or the slice before it was summed over
    replicas or gradients that came late were added. `begin_backward` puts it back, so that sums are taken in
    the order of a step whose number of backwards is known.
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
        self.slice = ReducedSlice(group, stores, policy.sums, policy.place_dtype(group.dtype))
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
        self._under_slice: FlatBuffer | None = None  # the whole buffer in which the slice lives
        self._room: Tensor | None = None  # of the slice, if it has room of its own, which stays
        self._room_is_free = False
        self._unreduced: FlatBuffer | None = None  # the whole buffer from before its reduction
        self._in_unreduced: set[int] = set()  # parameters that have a value in it
        self._slice_before: Tensor | None = None  # its sum over replicas, or what came late
        self._keeps_whole = policy.keeps_whole
        self._keeps_late = False  # what is about to be reduced came late, and stays for another backward
        self._begun = False  # there was a backward since clear()
        self._adds = False  # the whole buffer is for several backwards
        self._travels_in: torch.dtype | None = None  # if not in that of the whole buffer
        self._gradient_dtype = group.dtype
        self._opened_for: torch.dtype | None = None  # gradients that fit into the whole buffer as it is
        self._count = len(group.parameters)
        # Where ranks add up on their own, whole buffers stay for long, and may be added to after a reduction.
        short = group.shards > 1 and not policy.local
        self._in_communication_buffers = short and self._accelerator.capabilities.communication_buffers

    @property
    def times(self) -> int:
        """How many ranks of the job have the same slice."""
        return self.group.mesh.times(sliced=self.group.shards > 1)

    @property
    def full(self) -> bool:
        """Whether every parameter's gradient has come in this backward."""
        return len(self.fired) == self._count

    @property
    def partial(self) -> bool:
        """Whether some parameter has had no gradient on this rank."""
        return len(self.locally_used) < self._count

    def add(self, index: int, gradient: Tensor, more: bool) -> bool:
        """Put the gradient of parameter `index`, which autograd has accumulated, into the whole buffer, or
        add it to the one that is there.

        Returns whether every parameter has its gradient now, and had not before: reentrant checkpointing
        runs a backward inside the backward, and no gradient tells when that one ends. more: another graph has
        a gradient to be added to this one.
        """
        fired, came_before = self.fired, index in self.fired
        fired.add(index)
        self.locally_used.add(index)
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        again, whole = index in self.filled, self.whole
        if whole is None or again or gradient.dtype is not self._opened_for:
            self._gradient_dtype = gradient.dtype
            whole = self._open(again)
            self._opened_for = gradient.dtype
        if again:
            slot = whole.slots[index]
            self._accelerator.kernels.accumulate(whole.data[_window(slot)], _flat(gradient, slot))
        else:
            whole.views[index].copy_(gradient)
            self.filled.add(index)
        if more:
            fired.discard(index)
        return len(fired) == self._count and not came_before

    def _open(self, adds: bool = False) -> FlatBuffer:
        """The whole buffer, made if there is none, and widened if more is to be added than was expected; the
        first gradient decides its dtype. adds: a parameter's gradient comes in several parts."""
        dtype = self._policy.whole_dtype(self._gradient_dtype, self._adds or adds)
        if self.whole is None:
            self.whole = self._allocate_whole(dtype)
        elif self.whole.data.dtype.itemsize < dtype.itemsize:
            if not self._adds:
                self._travels_in = self.whole.data.dtype  # as on ranks where it comes in one
            self.whole = self._converted(self.whole, dtype)
        return self.whole

    def _allocate_whole(self, dtype: torch.dtype) -> FlatBuffer:
        nbytes = self.group.layout.numel * dtype.itemsize
        return self.allocate(nbytes, lambda: self._buffer(dtype))

    def _converted(self, whole: FlatBuffer, dtype: torch.dtype) -> FlatBuffer:
        """A copy in another dtype, or in its own; the original is released."""
        copy = self._allocate_whole(dtype)
        copy.data.copy_(whole.data)
        self.release_whole(whole)
        return copy

    def allocate(self, nbytes: int, allocation: Callable[[], T]) -> T:
        """Return what `allocation` returns; an error for lack of memory names the unit."""
        return allocate(self._stores, "for gradients of", self.group.unit, nbytes, allocation)

    def empty_slice(self, dtype: torch.dtype) -> Tensor:
        """Room on the device for the reduced slice."""
        kept = self._room
        if kept is not None and self._room_is_free and kept.dtype is dtype:
            self._room_is_free = False
            return kept
        room = self._new_slice(dtype)
        in_use = kept is not None and not self._room_is_free  # by the sum that this is added to
        if self._policy.stays and not in_use and self._policy.slice_dtype(self._gradient_dtype) is dtype:
            self._room, self._room_is_free = room, False
        return room

    def _new_slice(self, dtype: torch.dtype) -> Tensor:
        numel, device = self.group.layout.shard_numel, self._accelerator.device
        return self.allocate(numel * dtype.itemsize, lambda: torch.empty(numel, dtype=dtype, device=device))

    def seal(self) -> Tensor:
        """Make the whole buffer ready to be reduced: zero wherever no gradient came. Where none came at all,
        it gets the dtype that other ranks' gradients have."""
        if self.whole is None:  # the dtype that the parameters were computed in
            unit, group = self.unit, self.group
            cast = None if unit.resident else group.gather_format(unit.computed_in).dtype
            self._gradient_dtype = cast or group.dtype
        whole = self._open()
        for index in range(self._count):
            if index not in self.filled:
                whole.views[index].zero_()
        for gap in self.group.layout.gaps:
            whole.data[gap].zero_()
        return whole.data

    def store_reduced(self, whole: FlatBuffer | None, slice_: Tensor) -> None:
        """Add a reduced slice. `whole`, if it is not released yet, is now, unless the slice lives in it."""
        self.slice.add(slice_)
        before, self._under_slice = self._under_slice, None
        for each in (before, whole):
            if each is not None and self.slice.is_in(each.data):
                self._under_slice = each
            elif each is not None:
                self.release_whole(each)

    def detach_whole(self) -> FlatBuffer:
        """Hand the sealed buffer to a reduction, in the dtype that it travels in. Gradients that come later
        start a new one."""
        assert self.whole is not None
        whole, self.whole = self.whole, None
        filled, self.filled = self.filled, set()
        self.reduced = True
        if self._keeps_whole or self._keeps_late:
            self._keep(whole, filled)
        dtype = self._policy.reduce_dtype or self._travels_in or whole.data.dtype
        spent = self.group.shards == 1 or self._in_communication_buffers  # by the reduction
        if dtype is whole.data.dtype and not (spent and self.is_kept(whole)):
            return whole
        return self._converted(whole, dtype)

    def _keep(self, whole: FlatBuffer, filled: set[int]) -> None:
        """Keep what is about to be reduced; add it to what is kept if it came late, or in a further round."""
        if self._unreduced is None:
            self._unreduced, self._in_unreduced = whole, filled
            return
        wide = at_least_fp32(self._unreduced.data.dtype)
        if self._unreduced.data.dtype is not wide:
            narrow, self._unreduced = self._unreduced, None
            self._unreduced = self._converted(narrow, wide)
        kept = self._unreduced.data
        for index in filled:
            window = _window(whole.slots[index])
            if index in self._in_unreduced:
                self._accelerator.kernels.accumulate(kept[window], whole.data[window])
            else:
                kept[window].copy_(whole.data[window])
        self._in_unreduced |= filled

    def is_kept(self, whole: FlatBuffer) -> bool:
        """Whether a whole buffer stays after its reduction."""
        return whole is self._unreduced

    def keep_slice(self) -> None:
        """Keep the slice as it is, about to be summed over replicas, if another backward may follow and there
        is no whole buffer for it to add to."""
        if self._policy.open and not self._policy.keeps_whole:
            slice_ = self.slice.near
            self._slice_before = self.allocate(slice_.nbytes, slice_.clone)

    def add_to_kept_slice(self, slice_: Tensor) -> None:
        """Add a slice that is about to be summed over replicas by itself."""
        if self._slice_before is not None and not self._keeps_late:
            self._slice_before = added(self._slice_before, slice_, self._accelerator.kernels)

    def keep_late(self) -> None:
        """Gradients that came late on some rank are about to be reduced. Keep them, and the slice that they
        are added to, if another backward may follow: its own are then added to them first, on each rank."""
        if not self._policy.open or self._policy.local:
            return
        self._keeps_late = True
        if self._slice_before is None and (slice_ := self.slice.find()) is not None:
            near = self.group.placement.gradients.near
            room = self._accelerator.device if near else HOST
            self._slice_before = self.allocate(self.slice_bytes, lambda: _copy(slice_, room))

    def drop_kept(self) -> None:
        """Keep nothing from before reductions: what further backwards leave is added to the slice. Called
        where that has changed since, on all ranks, or to make room."""
        if self._unreduced is not None:
            unreduced, self._unreduced = self._unreduced, None
            self.release_whole(unreduced)
        self._slice_before = None
        self._keeps_whole = False

    def device_bytes(self) -> int:
        """Bytes of the device in use; a slice that lives in a whole buffer counts as that."""
        wholes = (self.whole, self._unreduced, self._under_slice)
        held = sum(whole.nbytes for whole in wholes if whole is not None)
        held += sum(map(held_bytes, self._buffers.values()))
        before = self._slice_before
        held += 0 if before is None or before.device != self._accelerator.device else before.nbytes
        held += 0 if self._room is None or not self._room_is_free else self._room.nbytes
        return held + (self.slice.device_bytes() if self._under_slice is None else 0)

    @property
    def slice_bytes(self) -> int:
        """Bytes that the reduced slice takes; before the first one, that it will take."""
        dtype = self.slice.dtype or self._policy.slice_dtype(self._gradient_dtype)
        return self.group.layout.shard_numel * dtype.itemsize

    def begin_backward(self, last: bool) -> None:
        """last: as in `GradientReducer.begin_backward`. If a disk fails, only the slice is missing."""
        self._forget_progress()
        self._adds = self._begun or not last  # the same on all ranks, also where no gradient came
        self._begun = True
        self._put_back()

    def _put_back(self) -> None:
        """Make the latest reduction undone, to be made anew with the gradients that are about to come."""
        if self._unreduced is None and self._slice_before is None:
            return
        self._drop_slice()
        if self._unreduced is not None:
            self.whole, self._unreduced = self._unreduced, None
            self.filled = self._in_unreduced
        if self._slice_before is not None:
            slice_, self._slice_before = self._slice_before, None
            self.slice.add(slice_)

    def _drop_slice(self) -> None:
        if self._room is not None and not self._room_is_free:
            self._room_is_free = self.slice.is_in(self._room)
            self._room = self._room if self._room_is_free else None
        self.slice.clear()
        if self._under_slice is not None:
            self._leave(self._under_slice)
            self._under_slice = None
        self.total = False

    def _forget_progress(self) -> None:
        self._travels_in = self._opened_for = None
        self._keeps_late = False
        self.fired.clear()
        self.closed = False
        self.reduced = False

    def begin_round(self) -> None:
        """The group will be complete once more in this backward."""
        self.fired = set(self.filled)
        self.closed = False

    def clear(self) -> None:
        """Forget everything of this optimizer step."""
        self.drop_kept()
        self._keeps_whole = self._policy.keeps_whole
        self._drop_slice()
        if self.whole is not None:
            self.release_whole(self.whole)
            self.whole = None
        self._begun = False
        self._forget_progress()
        self.filled.clear()
        self.locally_used.clear()
        self.used.clear()

    def leave_device(self) -> None:
        """Drop the memory that stays from one step to the next, between steps."""
        self._room, self._room_is_free = None, False
        self._buffers.clear()

    def forget(self, index: int) -> None:
        """Parameter `index` has no gradient any more. What is left of it in the slice is to be made zero."""
        for known in (self.filled, self.locally_used, self.used):
            known.discard(index)

    def zero_unreduced(self, index: int) -> None:
        """Make what has not been reduced of a parameter's gradient zero."""
        if self.whole is not None and index in self.filled:
            self.whole.views[index].zero_()

    def release_whole(self, whole: FlatBuffer) -> None:
        """Release a whole buffer that has been reduced, so that other gradients can use it, unless it is
        kept. One in memory of the library of collectives must not be written to again: it is let go."""
        if self.is_kept(whole) or self._in_communication_buffers:
            return
        whole.release()
        self._buffers.setdefault(whole.data.dtype, whole)

    def _leave(self, whole: FlatBuffer) -> None:
        """Part with the buffer of a slice, for the next one."""
        if self._policy.stays and not self.is_kept(whole):
            self._buffers.setdefault(whole.data.dtype, whole)
        else:
            self.release_whole(whole)

    def _buffer(self, dtype: torch.dtype) -> FlatBuffer:
        home, accelerator = self.group.home, self._accelerator
        if self._in_communication_buffers:
            numel, ranks = self.group.layout.numel, self.group.mesh.shards
            data = accelerator.collectives.empty(numel, dtype, accelerator.device, ranks)
            return FlatBuffer(data, home.parameters, home.slots)
        buffer = self._buffers.pop(dtype, None) or accelerator.flat_buffers.empty_like(home, dtype)
        buffer.materialize()
        return buffer


def _copy(values: Values, device: torch.device) -> Tensor:
    """What is on disk is a copy once it is read."""
    return values.to(device, copy=True) if isinstance(values, Tensor) else values.to(device)


def _window(slot: Slot) -> slice:
    return slice(slot.offset, slot.offset + slot.numel)


def _flat(gradient: Tensor, slot: Slot) -> Tensor:
    """The gradient as (n,), in the memory order of the slot, because kernels take flat tensors. Copied only
    where strides differ."""
    if gradient.stride() != slot.stride:
        gradient = gradient.new_empty_strided(slot.shape, slot.stride).copy_(gradient)
    return gradient.as_strided((slot.numel,), (1,))
