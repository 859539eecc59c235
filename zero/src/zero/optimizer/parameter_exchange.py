"""Values of a group on their way between the ranks' slices and whole parameters, along `routes`.

What may run out of memory and what is collective are separate methods, so that ranks can agree in between.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zero.communication.communicator import Communicator
from zero.optimizer.routes import Routes
from zero.tiers.stores import Stores
from zero.tiers.values import Values, fetch


class ParameterExchange:
    """Exchanges go through the device, wherever the values come from and go to."""

    def __init__(self, stores: Stores, communicator: Communicator) -> None:
        self._device = stores.accelerator.device
        self._communicator = communicator

    def parts_of(self, routes: Routes, slice_: Values) -> Tensor:
        """The parts of this rank's slice, (shard_numel,), that belong to the parameters that each rank steps,
        rank by rank."""
        near = fetch(slice_, self._device, self._communicator)
        return torch.cat([near[window] for window in routes.windows] or [near[:0]])

    def assemble(self, unit: str, routes: Routes, parts: Tensor, whole: Tensor) -> None:
        """Collective. Fill `whole`, (routes.numel,), with the parameters that this rank steps, one after
        another, from every rank's `parts_of` its slice."""
        self._communicator.all_to_all(unit, whole, parts, routes.taken, routes.given, routes.total).wait()

    def way_back_bytes(self, routes: Routes, whole: Tensor) -> int:
        """Bytes of the device that `take_apart` needs."""
        numel = sum(routes.given) + (0 if whole.device == self._device else routes.numel)
        return numel * whole.element_size()

    def take_apart(self, unit: str, routes: Routes, whole: Tensor, room: Tensor, slice_: Tensor) -> None:
        """Collective. The reverse of `assemble`, into this rank's `slice_`. room: bytes on the device, at
        least `way_back_bytes`."""
        room = room[: self.way_back_bytes(routes, whole)].view(whole.dtype)
        parts, rest = room.split([given := sum(routes.given), room.numel() - given])
        near = whole if whole.device == self._device else rest.copy_(whole)
        self._communicator.all_to_all(unit, parts, near, routes.given, routes.taken, routes.total).wait()
        lengths = [window.stop - window.start for window in routes.windows]
        for window, part in zip(routes.windows, parts.split(lengths), strict=True):
            slice_[window].copy_(part)
