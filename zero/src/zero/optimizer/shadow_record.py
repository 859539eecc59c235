"""A second copy of a record on the host: stepped there, unseen, and then put in the record's place."""

from __future__ import annotations

import torch
from torch import Tensor

from accelz import HOST
from zero.optimizer.group_step import Factors, GroupStep
from zero.optimizer.owned import OwnedSubGroup
from zero.tiers.record import Opened
from zero.tiers.stores import Stores
from zero.tiers.values import put
from zero.tiers.weight_writer import complete


class ShadowRecord:
    """The shadow of a sub-group's record: a kernel serves the sub-group, and the record is on the host. It
    takes as much memory as the record and, where the master is not the shard, as the weights."""

    def __init__(self, stores: Stores, owned: OwnedSubGroup) -> None:
        sub, state = owned.sub, owned.sub.kept.opened()
        empty_host = stores.accelerator.memory.empty_host
        self._stores = stores
        self._kernels = stores.kernels(HOST)
        self._owned = owned
        self._serves = sub.shard_serves  # gathers read the master, so it has to be page-locked
        locked = empty_host(state.master.shape, state.master.dtype) if self._serves else None
        master = torch.empty_like(state.master) if locked is None else locked
        self._state = Opened(master, tuple(torch.empty_like(moment) for moment in state.moments))
        self._steps = torch.empty_like(owned.counted.steps)
        self._weights = None if self._serves else empty_host((sub.numel,), sub.shard.dtype)

    def step(self, step: GroupStep, gradient: Tensor, factors: Factors) -> None:
        """Copy the record and step the copy. gradient, factors: on the host.

        The gradient has landed, and so have the weights that the shadow sent last: see `Carrier.send`. What
        the device was to read of this memory while it was the record had been read when that ended: see
        `begin_write`.
        """
        record, mine = self._owned.sub.kept.opened(), self._state
        mine.master.copy_(record.master)
        for moment, theirs in zip(mine.moments, record.moments, strict=True):
            moment.copy_(theirs)
        self._steps.copy_(self._owned.counted.steps)
        narrow = self._narrow
        step.run(self._kernels, mine, self._steps, gradient, factors, narrow)
        if self._weights is not None:
            written = step.written if narrow is not None else ()
            complete(self._kernels, self._weights, mine.master, written)

    @property
    def _narrow(self) -> Tensor | None:
        """The weights, if the kernel itself can write them."""
        weights = self._weights
        wide = weights is None or weights.dtype.itemsize == self._state.master.dtype.itemsize
        return None if wide else weights

    def swap_in(self) -> None:
        """Change places with the record, which becomes the shadow; the weights begin to go to where the shard
        is."""
        group, sub, count = self._owned.group, self._owned.sub, self._owned.counted
        before, after = sub.kept.opened(), self._state
        is_all = sub.shard is group.shard  # a part of the shard has to stay where it is
        if self._serves and not is_all:
            before.master.copy_(after.master)
            before, after = Opened(after.master, before.moments), Opened(before.master, after.moments)
        sub.kept.master, sub.kept.moments, self._state = after.master, after.moments, before
        count.steps, self._steps = self._steps, count.steps
        if self._serves:
            if is_all:
                group.shard = after.master
            return
        assert self._weights is not None
        if isinstance(sub.shard, Tensor) and sub.shard.device != HOST:
            self._stores.carrier.send(self._weights, sub.shard)
        else:
            put(sub.shard, slice(0, self._weights.numel()), self._weights)
