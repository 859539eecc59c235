"""A record that lives on the host and is stepped on the device: it comes for its step, and goes back."""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor

from accelz import Event
from zero.optimizer.stepped import SteppedSubGroup
from zero.ranges import in_range
from zero.tiers.carrier import Carrier
from zero.tiers.room import allocate
from zero.tiers.stores import Stores
from zero.tiers.tier import ON_DEVICE, Opened, Record


class Residence(Enum):
    """Where a record is, and what that costs: bytes of the device, for a record of R bytes on the host.

    A master that is the shard on the device is not counted.
    """

    ON_HOST = "0: on the host"
    PREFETCHING = "R: on the host; the device is making a copy"
    ON_DEVICE = "R: on the device; what the host has is old"
    EVICTING = "R: on the device; it is being copied to the host"


class StreamedRecord:
    """The record of one sub-group. outwards: carries records back to the host, while `stores.carrier` brings
    others."""

    def __init__(self, stores: Stores, stepped: SteppedSubGroup, outwards: Carrier) -> None:
        self.residence = Residence.ON_HOST
        self.stepped = stepped
        self._accelerator = stores.accelerator
        self._stores = stores
        self._outwards = outwards
        self._home: Record | None = None  # the record on the host while there is a copy
        self._near: list[Tensor] = []  # master and moments on the device
        self._copied: Event | None = None  # the last copy, either way
        self._versions: list[int] = []  # of the originals, when the copy began

    @property
    def nbytes(self) -> int:
        """Bytes of the device that the record takes while it is there."""
        return sum(values.nbytes for values in self._values() if self._is_away(values))

    @property
    def may_keep_on_device(self) -> bool:
        """Whether it may stay on the device after its step. It may not where its master on the host is the
        shard, which the next gather reads."""
        master = self._host_record.opened().master
        return self.stepped.sub.shard is not master or not self._is_away(master)

    @property
    def kept_on_device(self) -> bool:
        """Whether the sub-group's record is the one on the device."""
        return self._host_record is not self.stepped.record

    @in_range("bring", lambda self: self.stepped.group.unit)
    def prefetch(self) -> None:
        """Begin to copy it to the device. Raises torch.OutOfMemoryError, having changed nothing."""
        assert self.residence is Residence.ON_HOST
        device, home = self._accelerator.device, self._values()
        near = [torch.empty_like(v, device=device) if self._is_away(v) else v for v in home]
        self._home, self._near, self._versions = self._host_record, near, self.stepped.versions()
        for there, here in zip(home, near, strict=True):
            if here is not there:
                self._copied = self._stores.carrier.send(there, here)
        self.residence = Residence.PREFETCHING

    def open(self) -> Opened:
        """The record on the device, to be stepped: work that is queued from now on finds it there."""
        if self.residence is Residence.PREFETCHING and self._versions != self.stepped.versions():
            self.discard_device_copy()
        if self.residence is Residence.ON_HOST:
            unit = self.stepped.group.unit
            allocate(self._stores, "for the optimizer state of", unit, self.nbytes, self.prefetch)
        if self._copied is not None:
            self._accelerator.streams.current().wait(self._copied)
        self.residence = Residence.ON_DEVICE
        return Opened(self._near[0], tuple(self._near[1:]))

    def keep_on_device(self) -> None:
        """Let the copy on the device be the sub-group's record until it has landed on the host."""
        assert self.residence is Residence.ON_DEVICE
        self.stepped.sub.record = Record(ON_DEVICE, self._near[0], tuple(self._near[1:]))

    @in_range("evict", lambda self: self.stepped.group.unit)
    def evict(self) -> None:
        """Begin to copy it back."""
        assert self.residence is Residence.ON_DEVICE
        for there, here in zip(self._values(), self._near, strict=True):
            if here is not there:
                self._copied = self._outwards.send(here, there)
        self.residence = Residence.EVICTING

    def wait_evicted(self) -> None:
        """Wait until it is back; its memory on the device is then free."""
        assert self.residence is Residence.EVICTING
        if self._copied is not None:
            self._copied.synchronize()
        self._forget()

    def discard_device_copy(self) -> None:
        """Give up the copy on the device, stepped or not: the values on the host are the true ones."""
        if self._copied is not None:
            self._accelerator.streams.current().wait(self._copied)
        self._forget()

    def _forget(self) -> None:
        self.stepped.sub.record = self._host_record
        self.residence, self._home, self._copied = Residence.ON_HOST, None, None
        self._near.clear()

    @property
    def _host_record(self) -> Record:
        """The record on the host, wherever its true values are."""
        return self._home or self.stepped.record

    def _values(self) -> list[Tensor]:
        home = self._host_record.opened()
        return [home.master, *home.moments]

    def _is_away(self, values: Tensor) -> bool:
        return values.device != self._accelerator.device
