"""Send the weights of a stepped record to the shard, wherever that is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeGuard

import torch
from torch import Tensor

from accelz import HOST
from zero.tiers.stores import Stores
from zero.tiers.values import Values, put


class WeightWriter:
    """Sends the weights of one record to its shard.

    narrow: where the optimizer's kernel writes 16-bit weights; None if it need not.
    """

    def __init__(self, stores: Stores, shard: Values, master: Tensor) -> None:
        self._stores = stores
        self._shard = shard
        self._master = master
        self._target = shard if self._is_near(shard) else self._make_staging(shard)
        narrow = self._target.dtype.itemsize < master.dtype.itemsize
        self.narrow = self._target if narrow else None

    def deliver(self, stepped: Iterable[slice], skip: Tensor | None) -> None:
        """Send the weights to the shard.

        stepped: the stretches that the kernel has written to `narrow`, unless `skip` is 1.
        """
        if self._target is not self._shard:
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
