"""Send the weights of a stepped record to the shard, wherever that is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeGuard

import torch
from torch import Tensor

from accelz import HOST
from zero.tiers.stores import Stores
from zero.tiers.tier import Opened
from zero.tiers.values import Values, in_memory, put


class WeightWriter:
    """Sends the weights of one record to its shard.

    state: the record. narrow: where the optimizer's kernel writes 16-bit weights; None if it need not. Beside
    a split master they are there before, as the kernel reads them.
    """

    def __init__(self, stores: Stores, shard: Values, state: Opened) -> None:
        self._stores = stores
        self._shard = shard
        self._master = state.master
        self._is_split = state.is_split
        self._target = shard if self._is_near(shard) else self._make_staging(shard)
        narrow = self._is_split or self._target.dtype.itemsize < self._master.dtype.itemsize
        self.narrow = self._target if narrow else None
        if self._is_split and self._target is not shard:
            self._fetch(shard, self._target)

    def deliver(self, stepped: Iterable[slice], skip: Tensor | None) -> None:
        """Send the weights to the shard.

        stepped: the stretches that the kernel has written to `narrow`, unless `skip` is 1.
        """
        if self._is_split:
            self._send()
        elif self._target is not self._shard:
            written = self.narrow is not None and (skip is None or not bool(skip))
            self._fill(stepped if written else ())
        elif self.narrow is None:
            self._fill(())

    def deliver_master(self) -> None:
        """Send the master's values to the shard, after an optimizer that writes only the master."""
        self._fill(())

    def _fill(self, written: Iterable[slice]) -> None:
        """Fill the target from the master, except in the stretches already `written`, and send it."""
        target, master = self._target, self._master
        kernels = self._stores.kernels(target.device)
        for gap in _between(written, target.numel()) if target is not master else ():
            kernels.scale_cast(target[gap], master[gap])
        self._send()

    def _fetch(self, shard: Values, target: Tensor) -> None:
        """Fill the target with the weights as they are."""
        target.copy_(in_memory(shard))
        if shard.device != target.device:
            where = "to host" if self._is_away(shard) else "to device"
            self._stores.count_move(where, target.nbytes)

    def _send(self) -> None:
        """Send the target to the shard, unless that is the target."""
        target = self._target
        if self._is_away(self._shard):
            self._stores.carrier.to_device(target, self._shard)
        elif target is not self._shard:
            put(self._shard, slice(0, target.numel()), target)

    def _is_near(self, shard: Values) -> TypeGuard[Tensor]:
        return isinstance(shard, Tensor) and shard.device == self._master.device

    def _is_away(self, shard: Values) -> TypeGuard[Tensor]:
        """Whether the shard is on the device, and the master is not."""
        return isinstance(shard, Tensor) and shard.device not in (HOST, self._master.device)

    def _make_staging(self, shard: Values) -> Tensor:
        if self._is_away(shard):
            return self._stores.carrier.slot(shard.numel(), shard.dtype)
        return torch.empty(shard.numel(), dtype=shard.dtype, device=self._master.device)


def _between(windows: Iterable[slice], numel: int) -> Iterator[slice]:
    """Yield the stretches of `numel` elements that ascending windows leave out."""
    end = 0
    for window in windows:
        if window.start > end:
            yield slice(end, window.start)
        end = window.stop
    if end < numel:
        yield slice(end, numel)
