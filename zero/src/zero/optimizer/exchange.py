"""Values of a group on their way between the ranks' slices and whole parameters. Collective."""

from __future__ import annotations

import torch
from torch import Tensor

from zero.communication.communicator import Communicator
from zero.optimizer.owned import OwnedSubGroup
from zero.optimizer.routes import Routes
from zero.tiers.stores import Stores
from zero.tiers.values import Values, fetch


class Exchange:
    """It happens on the device, wherever values come from."""

    def __init__(self, stores: Stores, communicator: Communicator) -> None:
        self._device = stores.accelerator.device
        self._communicator = communicator

    def assemble(self, owned: OwnedSubGroup, slice_: Values) -> Tensor:
        """The parameters that this rank steps, one after another, from everybody's `slice_`.

        slice_: (shard_numel,). One that cannot be read counts as zeros, which the next `agree` tells.
        """
        routes = _routes_of(owned)
        near = torch.zeros(slice_.numel(), dtype=slice_.dtype, device=self._device)
        with self._communicator.postponing():
            near = fetch(slice_, self._device)
        parts = torch.cat([near[window] for window in routes.windows] or [near[:0]])
        whole = torch.empty(routes.numel, dtype=near.dtype, device=self._device)
        self._communicator.all_to_all(owned.group.unit, whole, parts, routes.counts).wait()
        return whole

    def take_apart(self, owned: OwnedSubGroup, whole: Tensor, slice_: Tensor) -> None:
        """The reverse, into this rank's `slice_`."""
        routes = _routes_of(owned)
        lengths = [window.stop - window.start for window in routes.windows]
        parts = torch.empty(sum(lengths), dtype=whole.dtype, device=self._device)
        self._communicator.all_to_all(owned.group.unit, parts, whole.to(self._device), routes.back).wait()
        for window, part in zip(routes.windows, parts.split(lengths), strict=True):
            slice_[window].copy_(part)


def _routes_of(owned: OwnedSubGroup) -> Routes:
    assert owned.routes is not None
    return owned.routes
