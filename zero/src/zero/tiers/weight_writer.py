"""Send the weights of a stepped record to the shard, wherever that is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from accelz import HOST, Kernels
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
        self._staging: Tensor | None = None
        if shard is not master and not self._is_near(shard):
            self._staging = self._make_staging(shard)
        target = shard if self._staging is None else self._staging
        narrow = target is not master and target.dtype.itemsize < master.dtype.itemsize
        self.narrow = target if narrow and isinstance(target, Tensor) else None

    def deliver(self, stepped: Iterable[slice], skip: Tensor | None = None) -> None:
        """Send the weights to the shard.

        stepped: the stretches that the kernel has written to `narrow`, unless `skip` is 1.
        """
        if self._staging is not None:
            written = self.narrow is not None and (skip is None or not bool(skip))
            kernels = self._stores.kernels(self._staging.device)
            complete(kernels, self._staging, self._master, stepped if written else ())
            self._send(self._staging)
        elif self.narrow is None and isinstance(self._shard, Tensor) and self._shard is not self._master:
            self._shard.copy_(self._master)

    def deliver_master(self) -> None:
        """Send the master's values to the shard, after an optimizer that writes only the master."""
        if self.narrow is None or self._staging is not None:
            self.deliver(())
        else:
            complete(self._stores.kernels(self.narrow.device), self.narrow, self._master, ())

    def _is_near(self, shard: Values) -> bool:
        return isinstance(shard, Tensor) and shard.device == self._master.device

    def _make_staging(self, shard: Values) -> Tensor:
        numel, dtype = shard.numel(), shard.dtype
        if isinstance(shard, Tensor) and shard.device != HOST:
            return self._stores.carrier.slot(numel, dtype)
        return torch.empty(numel, dtype=dtype, device=self._master.device)

    def _send(self, staging: Tensor) -> None:
        if isinstance(self._shard, Tensor) and self._shard.device != HOST:
            self._stores.carrier.to_device(staging, self._shard)
        else:
            put(self._shard, slice(0, staging.numel()), staging)


def complete(kernels: Kernels, weights: Tensor, master: Tensor, written: Iterable[slice]) -> None:
    """Fill `weights` from `master`, except in the stretches already `written` (ascending)."""
    for gap in _between(written, weights.numel()):
        kernels.scale_cast(weights[gap], master[gap])


def _between(windows: Iterable[slice], numel: int) -> Iterator[slice]:
    """Yield the stretches of `numel` elements that ascending windows leave out."""
    end = 0
    for window in windows:
        if window.start > end:
            yield slice(end, window.start)
        end = window.stop
    if end < numel:
        yield slice(end, numel)
