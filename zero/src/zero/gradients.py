"""Gradients on their way from autograd to this rank's shard.

Each trainable group has a whole flat gradient buffer while its backward runs. A parameter's gradient is
written into it once, as soon as autograd has accumulated it. When a group is complete its buffer is
reduce-scattered (replicated groups: all-reduced) and its bytes are dropped; what stays is this rank's
slice, the *sum* over ranks. Averaging, unscaling and clipping are one factor that the optimizer applies.

Buffers are reduced in one fixed order, so that ranks whose graphs differ (a module used on one rank only)
still issue the same collectives. What is incomplete at the end of the backward is agreed on over host
memory: a parameter that no rank used has no gradient and is not stepped, as with `grad = None`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from accelz.flat_buffer import HOST, FlatBuffer
from zero.communicator import Communicator, NamedHandle
from zero.flat_group import FlatGroup
from zero.room import allocate
from zero.sharded_unit import ShardedUnit
from zero.tiers.carrier import Landing
from zero.tiers.stores import Stores
from zero.tiers.swap_file import Section
from zero.tiers.values import Values, fetch
from zero.units import PERSISTENT, ROOT

T = TypeVar("T")
IN_FLIGHT = 2  # whole gradient buffers that may be under reduction while backward goes on


@dataclass(frozen=True)
class GradientPolicy:
    """steps: micro-batches per optimizer step. local: communicate only at the last of them.
    reduce_dtype: dtype gradients travel in; None keeps the one they are computed in."""

    steps: int
    local: bool
    reduce_dtype: torch.dtype | None


class Follower(Protocol):
    """Is told what becomes of gradients."""

    def arrived(self, gradients: GroupGradients) -> None:
        """A slice of the last micro-batch is reduced: in its tier, or on its way there. Again where a late
        gradient is added."""

    def dropped(self) -> None:
        """No gradient of before counts any more."""


class GroupGradients:
    """The gradients of one trainable group. Another thread may ask for `shard` at any time.

    fired: parameters whose gradient came in this backward. closed: no more will come in this backward.
    filled: parameters that have a value in `whole`. have: parameters with a gradient on this rank since
    the last agreement; used: on any rank since the last step.
    """

    def __init__(self, group: FlatGroup, unit: ShardedUnit, stores: Stores, policy: GradientPolicy) -> None:
        self.group = group
        self.unit = unit
        self.fired: set[int] = set()
        self.closed = False
        self.filled: set[int] = set()
        self.have: set[int] = set()
        self.used: set[int] = set()
        self.reduced = False
        self.whole: FlatBuffer | None = None
        self._shard: Values | None = None
        self._place: Section | None = None  # for a gradient on disk
        self._landing: Landing | None = None  # on its way to be added to the shard
        self._lock = threading.Lock()  # while the shard is changed
        self._stores = stores
        self._accelerator = stores.accelerator
        self._policy = policy
        self._buffers: dict[torch.dtype, FlatBuffer] = {}  # released, kept for their views
        self._lent: list[FlatBuffer] = []
        self._gradient_dtype = group.dtype
        self._count = len(group.parameters)

    @property
    def complete(self) -> bool:
        """Whether everything that will come in this backward has come."""
        return self.closed or self.full

    @property
    def full(self) -> bool:
        """Whether every parameter's gradient has come in this backward."""
        return len(self.fired) == self._count

    @property
    def partial(self) -> bool:
        """Whether some parameter got no gradient on this rank."""
        return len(self.have) < self._count

    def add(self, index: int, gradient: Tensor) -> None:
        """Take the gradient of parameter `index` into the whole buffer."""
        self.fired.add(index)
        self.have.add(index)
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        self._gradient_dtype = gradient.dtype
        whole = self._open()
        if index in self.filled:
            self._accelerator.kernels.accumulate(whole.views[index], gradient)
        else:
            whole.views[index].copy_(gradient)
            self.filled.add(index)

    def _open(self) -> FlatBuffer:
        """The whole buffer, made if there is none; its dtype is decided by the first gradient."""
        if self.whole is None:
            dtype = self._whole_dtype()
            self.whole = self.allocate(self.group.layout.numel * dtype.itemsize, lambda: self._buffer(dtype))
        return self.whole

    def allocate(self, nbytes: int, allocation: Callable[[], T]) -> T:
        """What `allocation` returns; running out of memory names the unit."""
        return allocate(self._stores, "for gradients of", self.group.unit, nbytes, allocation)

    def empty_slice(self, dtype: torch.dtype) -> Tensor:
        """Room on the device for the reduced slice."""
        numel, device = self.group.layout.shard_numel, self._accelerator.device
        return self.allocate(numel * dtype.itemsize, lambda: torch.empty(numel, dtype=dtype, device=device))

    def seal(self) -> Tensor:
        """The whole buffer ready to be reduced: zero wherever no gradient came."""
        whole = self._open()
        for index in range(self._count):
            if index not in self.filled:
                whole.views[index].zero_()
        for gap in self.group.layout.gaps:
            whole.data[gap].zero_()
        return whole.data

    @property
    def present(self) -> bool:
        """Whether there is a gradient."""
        return self._landing is not None or self._shard is not None  # a landing ends with the shard set

    @property
    def shard(self) -> Values | None:
        """The reduced slice, shape (shard_numel,), 16-bit or fp32, in its tier; waits until it is there."""
        with self._lock:
            if self._landing is not None:
                self._fold(self._landing.wait())
                self._landing = None
            return self._shard

    @property
    def away(self) -> bool:
        """Whether there is a gradient that takes no memory of the device."""
        if (landing := self._landing) is not None:
            return landing.event.done()
        return self._shard is not None and not _is_on(self._shard, self._accelerator.device)

    @property
    def reduced_slice(self) -> Values:
        """The slice of a group that has a gradient."""
        shard = self.shard
        assert shard is not None
        return shard

    def settle(self, whole: FlatBuffer, slice_: Tensor) -> None:
        """Fold a reduced slice into the shard. `whole` is released unless the slice lives in it."""
        if self.group.placement.gradients != "device":
            self._move(slice_)
        else:
            self._fold(slice_)
            if self._shard is whole.data:
                self._lent.append(whole)  # the shard lives in it until clear()
                return
        whole.release()
        self._buffers.setdefault(whole.data.dtype, whole)

    def _move(self, slice_: Tensor) -> None:
        """Begin to move a slice off the device; the one before it has had a micro-batch to land in."""
        _ = self.shard
        if slice_.device == HOST:
            self._fold(slice_)
        else:
            self._landing = self._stores.carrier.to_host(slice_)
            if self.group.placement.gradients == "disk":
                _ = self.shard  # host memory is short too

    def _fold(self, slice_: Tensor) -> None:
        widen = self._policy.steps > 1 and not self._policy.local  # sums of slices are kept in fp32
        if self._shard is not None:
            sum_ = fetch(self._shard, slice_.device)
            self._stores.kernels(slice_.device).accumulate(sum_, slice_)
            slice_ = sum_
        elif widen and slice_.dtype.itemsize < 4:
            slice_ = slice_.float()
        on_disk = self.group.placement.gradients == "disk"
        self._shard = self._put_away(slice_) if on_disk else slice_

    def _put_away(self, slice_: Tensor) -> Section:
        """On disk, in the place that this group's gradient had before."""
        if self._place is None or self._place.dtype is not slice_.dtype:
            self._place = self._stores.on_disk(slice_.numel(), slice_.dtype)
        self._place.write(slice_)
        return self._place

    def detach_whole(self) -> FlatBuffer:
        """Hand the sealed buffer over to a reduction; further gradients start a new one."""
        assert self.whole is not None
        whole, self.whole = self.whole, None
        self.filled.clear()
        self.reduced = True
        return whole

    def device_bytes(self) -> int:
        """Bytes of the device in use; a slice that lives in a whole buffer counts as that."""
        held = sum(whole.nbytes for whole in (self.whole, *self._lent) if whole is not None)
        shard = self._shard
        alone = isinstance(shard, Tensor) and _is_on(shard, self._accelerator.device) and not self._lent
        return held + (shard.numel() * shard.element_size() if shard is not None and alone else 0)

    @property
    def slice_bytes(self) -> int:
        """Bytes that the reduced slice takes."""
        widen = self._policy.steps > 1 and not self._policy.local
        item = torch.float32.itemsize if widen else self._whole_dtype().itemsize
        return self.group.layout.shard_numel * item

    def begin_backward(self) -> None:
        self.fired.clear()
        self.closed = False
        self.reduced = False

    def clear(self) -> None:
        """Forget everything of this optimizer step."""
        with self._lock:
            if self._landing is not None:
                self._landing.wait()
                self._landing = None
            self._shard = None
        for whole in (*self._lent, *([self.whole] if self.whole is not None else [])):
            whole.release()
            self._buffers.setdefault(whole.data.dtype, whole)
        self._lent.clear()
        self.whole = None
        self.begin_backward()
        self.filled.clear()
        self.have.clear()
        self.used.clear()

    def _whole_dtype(self) -> torch.dtype:
        if self._policy.local and self._policy.steps > 1:
            # Sums of 16-bit gradients are kept in fp32.
            return torch.promote_types(self._gradient_dtype, torch.float32)
        return self._policy.reduce_dtype or self._gradient_dtype

    def _buffer(self, dtype: torch.dtype) -> FlatBuffer:
        known = self._buffers.pop(dtype, None)
        if known is not None:
            known.materialize()
            return known
        layout = self.group.layout
        data = torch.empty(layout.numel, dtype=dtype, device=self._accelerator.device)
        return FlatBuffer(data, (), layout.slots)


@dataclass
class _Reduction:
    gradients: GroupGradients
    whole: FlatBuffer
    result: Tensor
    handle: NamedHandle | None


class GradientReducer:
    """All trainable groups' gradients, reduced in a fixed order while backward runs.

    on_complete(unit): called when every trainable parameter of a unit has its gradient. follower: None where
    nobody follows.
    """

    def __init__(
        self,
        units: Sequence[ShardedUnit],
        stores: Stores,
        communicator: Communicator,
        policy: GradientPolicy,
        on_complete: Callable[[ShardedUnit], None],
    ) -> None:
        self._stores = stores
        self._communicator = communicator
        self._policy = policy
        self._on_complete = on_complete
        self.all: tuple[GroupGradients, ...] = tuple(
            GroupGradients(group, unit, stores, policy)
            for unit in units
            for group in unit.groups
            if group.trainable
        )
        self._by_unit: dict[ShardedUnit, list[GroupGradients]] = {}
        for gradients in self.all:
            self._by_unit.setdefault(gradients.unit, []).append(gradients)
        # Backward runs through the units from the last to the first; the root unit ends it.
        ends = [g for g in self.all if g.unit.name in (ROOT, PERSISTENT)]
        self._order = [*(g for g in reversed(self.all) if g not in ends), *ends]
        self._order_known = False
        self._observed: list[GroupGradients] = []
        self._next = 0
        self._communicate = True
        self._last = True
        self.follower: Follower | None = None
        self._reductions: list[_Reduction] = []

    @property
    def local(self) -> bool:
        """Whether gradients are communicated at the last micro-batch only."""
        return self._policy.local

    def begin_backward(self, last: bool) -> None:
        """A backward starts; last: of the micro-batches before the optimizer step."""
        self._last = last
        self._communicate = last or not self._policy.local
        self._next = 0
        self._observed.clear()
        for gradients in self.all:
            gradients.begin_backward()

    def receive(self, gradients: GroupGradients, index: int, gradient: Tensor) -> None:
        """Autograd has accumulated one parameter's gradient."""
        gradients.add(index, gradient)
        if not gradients.full:
            return
        self._observed.append(gradients)
        if self._communicate:
            self._advance()
        if all(g.full for g in self._by_unit[gradients.unit]):
            self._on_complete(gradients.unit)

    def close(self, unit: ShardedUnit) -> None:
        """The unit's backward is over: parameters without a gradient will not get one any more.

        Without this a parameter that only some ranks use would hold back the reductions of one rank
        while the others wait for them.
        """
        for gradients in self._by_unit.get(unit, ()):
            if not gradients.complete:
                gradients.closed = True
                self._observed.append(gradients)
        if self._communicate:
            self._advance()

    def finish_backward(self) -> None:
        """Reduce what is left, and agree with the other ranks on which parameters were used.

        Every group is reduced, used or not: a rank cannot know what the others used before it has
        issued the reductions that they may be waiting in.
        """
        if not self._communicate:
            return
        alone = self._communicator.group.size == 1
        for gradients in self._order:
            if gradients.filled or not (gradients.reduced or alone):
                self._reduce(gradients)
        while self._reductions:
            self._settle_oldest()
        self._learn_order()
        self._agree_on_usage()

    def norm_and_nonfinite(self) -> Tensor:
        """Of this rank's slices: (2,) fp32 on the device, sum of squares and whether one is not finite."""
        near: list[Values] = []
        far: list[Values] = []
        for gradients in self.all:
            if gradients.present:
                values = gradients.reduced_slice
                (near if _is_on(values, self._stores.accelerator.device) else far).append(values)
        result = self._norm_of(near)
        for values in far:  # one after another: what is on disk is not in memory all at once
            result = result + self._norm_of([fetch(values, HOST)]).to(result.device)
        return result

    def _norm_of(self, values: Sequence[Values]) -> Tensor:
        tensors = [v for v in values if isinstance(v, Tensor)]
        if not tensors:
            return torch.zeros(2, dtype=torch.float32, device=self._stores.accelerator.device)
        return self._stores.kernels(tensors[0].device).norm_and_nonfinite(tensors)

    def device_bytes(self) -> int:
        """Bytes of the device in use for whole buffers and slices."""
        flying = sum(
            r.whole.nbytes + (0 if r.result is r.whole.data else r.result.nbytes) for r in self._reductions
        )
        return flying + sum(gradients.device_bytes() for gradients in self.all)

    def clear(self) -> None:
        """Drop all gradients: after the optimizer step, or after an exception."""
        if self.follower is not None:
            self.follower.dropped()
        for reduction in self._reductions:
            if reduction.handle is not None and not self._communicator.failed:
                reduction.handle.wait()
        self._reductions.clear()
        for gradients in self.all:
            gradients.clear()

    def _advance(self) -> None:
        while self._next < len(self._order) and self._order[self._next].complete:
            self._reduce(self._order[self._next])
            self._next += 1

    def _reduce(self, gradients: GroupGradients) -> None:
        data = gradients.seal()
        whole = gradients.detach_whole()
        group, unit = gradients.group, gradients.unit.name
        result, handle = data, None
        if group.shards > 1:
            result = gradients.empty_slice(data.dtype)
            handle = self._communicator.reduce_scatter(unit, result, data)
        elif self._communicator.group.size > 1:
            handle = self._communicator.all_reduce(unit, data)
        self._reductions.append(_Reduction(gradients, whole, result, handle))
        if len(self._reductions) >= IN_FLIGHT:
            self._settle_oldest()

    def _settle_oldest(self) -> None:
        done = self._reductions.pop(0)
        if done.handle is not None:
            done.handle.wait()
        done.gradients.settle(done.whole, done.result)
        if self._last and self.follower is not None:
            self.follower.arrived(done.gradients)

    def _agree_on_usage(self) -> None:
        """Note which parameters have a gradient on any rank."""
        counts = [len(g.group.parameters) for g in self.all]
        if self._communicator.agree(any(g.partial for g in self.all)):
            mine = torch.cat([_flags(g.have, n) for g, n in zip(self.all, counts, strict=True)])
            used = [f.nonzero().flatten().tolist() for f in self._communicator.any_of(mine).split(counts)]
        else:
            used = [range(n) for n in counts]
        for gradients, indices in zip(self.all, used, strict=True):
            gradients.used.update(indices)
            gradients.have.clear()

    def _learn_order(self) -> None:
        """After the first backward, take rank 0's order of completion for all later ones."""
        if self._order_known:
            return
        self._order_known = True
        place = {g: i for i, g in enumerate(self.all)}
        seen = list(dict.fromkeys(self._observed))
        order = torch.tensor([place[g] for g in (*seen, *(g for g in self._order if g not in seen))])
        if self._communicator.group.size > 1:
            self._communicator.broadcast("gradient order", order, 0)
        self._order = [self.all[i] for i in order.tolist()]


def _is_on(values: Values, device: torch.device) -> bool:
    return isinstance(values, Tensor) and values.device == device


def _flags(indices: Iterable[int], count: int) -> Tensor:
    flags = torch.zeros(count, dtype=torch.uint8)
    flags[list(indices)] = 1
    return flags
