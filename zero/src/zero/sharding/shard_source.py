"""Supply a rank's values from any tier: its shard to a gather, ahead or on demand; others to who asks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from accelz import Event
from zero.communication.communicator import Communicator
from zero.ranges import in_range
from zero.tiers.room import allocate
from zero.tiers.stores import Stores
from zero.tiers.swap_file import Section
from zero.tiers.values import Values


def fetch(values: Values, device: torch.device, communicator: Communicator) -> Tensor:
    """Return `values.to(device)`; zeros if they cannot be read, which the next agreement reports."""
    with communicator.postponing_disk_errors():
        return values.to(device)
    return torch.zeros(values.numel(), dtype=values.dtype, device=device)


class ShardSource:
    """This rank's shard of a group, for gathers. shard: the values, in any tier. unit: named in errors."""

    def __init__(self, stores: Stores, unit: str, shard: Values) -> None:
        self.shard = shard
        self._unit = unit
        self._stores = stores
        self._device = stores.accelerator.device
        self._streams = stores.accelerator.streams
        self._brought: tuple[Tensor, Event] | None = None  # the shard on the device, and since when
        self._read: Event | None = None  # the device's last copy from a shard on the host

    @property
    def resting(self) -> Tensor | None:
        """The shard if it stays on the device; None if it is on the host or on disk."""
        shard = self.shard
        return shard if isinstance(shard, Tensor) and shard.device == self._device else None

    @property
    def brought_bytes(self) -> int:
        """Bytes of the device taken by a shard that lives elsewhere and was brought for a gather."""
        return 0 if self._brought is None else self._brought[0].nbytes

    @contextmanager
    def in_memory(self) -> Iterator[Tensor]:
        """Yield the shard, on the device or the host, to be copied from in the block.

        On an asynchronous device the copy may come later; see `await_reads`.
        """
        if isinstance(self.shard, Section):
            with self._stores.read_ahead.use(self.shard) as shard:
                yield shard
        elif self._brought is not None:
            near, there = self._brought
            self._streams.current().wait(there)
            yield near
            self._brought = near, self._streams.current().record()
        else:
            assert isinstance(self.shard, Tensor)
            try:
                yield self.shard
            finally:
                if self.shard.device != self._device:
                    now = self._streams.current()
                    if self._read is not None:
                        now.wait(self._read)  # it may be of another stream
                    self._read = now.record()

    @contextmanager
    def on_device(self) -> Iterator[Tensor]:
        """Yield what `in_memory` does, moved to the device if it is not there."""
        with self.in_memory() as shard:
            self._stores.count_move("to device", shard.nbytes if shard.device != self._device else 0)
            move = partial(shard.to, self._device, non_blocking=True)
            yield allocate(self._stores, "to gather", self._unit, shard.nbytes, move)

    def start_read(self) -> bool:
        """Begin to read a shard that is on disk; return False if the limit of reading ahead is reached."""
        return not isinstance(self.shard, Section) or self._stores.read_ahead.begin(self.shard)

    @in_range("bring", lambda self: self._unit)
    def bring(self) -> None:
        """Begin to move a shard that is away to the device, for a gather, until `take_back`."""
        shard = self.shard
        if isinstance(shard, Section):
            self.start_read()
        elif isinstance(shard, Tensor) and shard.device != self._device and self._brought is None:
            make = partial(torch.empty_like, shard, device=self._device)
            near = allocate(self._stores, "for the shard of", self._unit, shard.nbytes, make)
            self._read = self._stores.carrier.send(shard, near)
            self._brought = near, self._read

    def take_back(self) -> None:
        """Drop the device's copy of the shard: its gather is done, or the weights change."""
        if self._brought is not None:
            self._streams.current().wait(self._brought[1])
            self._brought = None

    def await_reads(self) -> None:
        """Wait until the device has finished reading a shard on the host, which may then be written to."""
        if self._read is not None:
            self._read.synchronize()
            self._read = None
