"""Values of groups on their way between the ranks' slices and whole parameters, along `routes`.

What may run out of memory is separate from what is collective, so that ranks can agree in between, once for
all groups: these take turns in one room on the device.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from accelz import HOST
from zero.communication.communicator import Communicator
from zero.optimizer.routes import Routes
from zero.sharding.flat_group import FlatGroup
from zero.tiers.stores import Stores
from zero.tiers.values import Values, fetch


class ParameterExchange:
    """Exchanges go through the device, wherever the values come from and go to. nbytes: of the room."""

    def __init__(self, stores: Stores, communicator: Communicator) -> None:
        self._device = stores.accelerator.device
        self._communicator = communicator
        self._rooms: tuple[Tensor, Tensor] | None = None

    @property
    def nbytes(self) -> int:
        return 0 if self._rooms is None else sum(room.nbytes for room in self._rooms)

    def open(self, sizes: Iterable[tuple[int, int]]) -> None:
        """Make room for exchanges, each of so many bytes of this rank's slice and of whole parameters that do
        not lie where they can be exchanged."""
        parts, wholes = (max(each) for each in zip(*sizes, strict=True))
        self._rooms = (self._empty(parts), self._empty(wholes))

    def close(self) -> None:
        self._rooms = None

    def parts(self, routes: Routes, dtype: torch.dtype) -> Tensor:
        """Room for the parts of this rank's slice, rank by rank, that belong to the parameters that each rank
        steps."""
        return self._room(0, sum(routes.given), dtype)

    def whole(self, routes: Routes, dtype: torch.dtype) -> Tensor:
        """Room for the parameters that this rank steps, one after another."""
        return self._room(1, routes.numel, dtype)

    def cut(self, routes: Routes, slice_: Values, parts: Tensor) -> None:
        """Fill `parts` from this rank's slice, (shard_numel,), of any tier."""
        if not parts.numel():
            return
        near = slice_ if isinstance(slice_, Tensor) else fetch(slice_, HOST, self._communicator)
        windows = [near[window] for window in routes.windows]
        if near.device == parts.device:
            torch.cat(windows, out=parts)
        else:
            parts.copy_(torch.cat(windows))

    def assemble(self, group: FlatGroup, routes: Routes, parts: Tensor, whole: Tensor) -> None:
        """Collective. Fill `whole`, (routes.numel,), with the parameters that this rank steps, from every
        rank's `parts`. Both are on the device."""
        self._communicator.all_to_all(
            group.unit, whole, parts, routes.taken, routes.given, routes.total, group.mesh.shards
        ).wait()

    def take_apart(self, group: FlatGroup, routes: Routes, whole: Tensor, slice_: Tensor) -> None:
        """Collective. The reverse of `cut` and `assemble`, into this rank's `slice_`."""
        parts = self.parts(routes, whole.dtype)
        near = whole if whole.device == self._device else self.whole(routes, whole.dtype).copy_(whole)
        self._communicator.all_to_all(
            group.unit, parts, near, routes.given, routes.taken, routes.total, group.mesh.shards
        ).wait()
        lengths = [window.stop - window.start for window in routes.windows]
        for window, part in zip(routes.windows, parts.split(lengths), strict=True):
            slice_[window].copy_(part)

    def _empty(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def _room(self, which: int, numel: int, dtype: torch.dtype) -> Tensor:
        assert self._rooms is not None
        return self._rooms[which][: numel * dtype.itemsize].view(dtype)
