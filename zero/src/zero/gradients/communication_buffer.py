"""A group's whole gradients in memory that the library of collectives moves from without copies."""

from __future__ import annotations

import torch

from accelz import Accelerator, FlatBuffer
from zero.sharding.flat_group import FlatGroup


class CommunicationBuffer(FlatBuffer):
    """The input of a reduce-scatter over the group's shards. What has been one must not be written to again
    (see `accelz.Collectives.empty`): released and materialized, it has other memory, and other views.
    """

    def __init__(self, group: FlatGroup, accelerator: Accelerator, dtype: torch.dtype) -> None:
        self._group = group
        self._accelerator = accelerator
        self._fill(dtype)

    @property
    def materialized(self) -> bool:
        return bool(self.views)

    def materialize(self) -> None:
        if not self.materialized:
            self._fill(self.data.dtype)

    def release(self) -> None:
        super().__init__(self.data.new_empty(0), self.parameters, ())

    def _fill(self, dtype: torch.dtype) -> None:
        """Take memory. Raises OutOfMemoryError."""
        home, device = self._group.home, self._accelerator.device
        numel, ranks = self._group.layout.numel, self._group.mesh.shards
        data = self._accelerator.collectives.empty(numel, dtype, device, ranks)
        super().__init__(data, home.parameters, home.slots)
