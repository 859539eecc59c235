"""Values of a group on their way between the ranks' slices and whole parameters. Collective."""

from __future__ import annotations

import torch
from torch import Tensor

from zero.communication.communicator import Communicator
from zero.optimizer.routes import Routes
from zero.tiers.stores import Stores
from zero.tiers.values import Values, fetch


class Exchange:
    """It happens on the device, wherever values come from."""

    def __init__(self, stores: Stores, communicator: Communicator) -> None:
        self._device = stores.accelerator.device
        self._communicator = communicator

    def assemble(self, unit: str, routes: Routes, slice_: Values) -> Tensor:
        """The parameters that this rank steps, one after another, from everybody's `slice_`.

        slice_: (shard_numel,). One that cannot be read counts as zeros, which the next `agree` tells.
        """
        near = self._fetch(slice_)
        parts = torch.cat([near[window] for window in routes.windows] or [near[:0]])
        del near
        whole = parts.new_empty(routes.numel)
        self._communicator.all_to_all(unit, whole, parts, routes.taken, routes.given, routes.total).wait()
        return whole

    def take_apart(self, unit: str, routes: Routes, whole: Tensor, slice_: Tensor) -> None:
        """The reverse, into this rank's `slice_`."""
        near = whole.to(self._device)
        parts = near.new_empty(sum(routes.given))
        self._communicator.all_to_all(unit, parts, near, routes.given, routes.taken, routes.total).wait()
        lengths = [window.stop - window.start for window in routes.windows]
        for window, part in zip(routes.windows, parts.split(lengths), strict=True):
            slice_[window].copy_(part)

    def _fetch(self, slice_: Values) -> Tensor:
        with self._communicator.postponing():
            return fetch(slice_, self._device)
        return torch.zeros(slice_.numel(), dtype=slice_.dtype, device=self._device)
