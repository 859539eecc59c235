"""What an engine's tiers share: kernels, copies between memories, swap files, and what can make room."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from typing import Protocol

import torch

import accelz
from accelz import Accelerator, Kernels
from zero.config.offload import Offload
from zero.observe.transfers import Transfers
from zero.tiers.carrier import Carrier
from zero.tiers.pipeline import Pipeline
from zero.tiers.placement import Placement
from zero.tiers.read_ahead import ReadAhead
from zero.tiers.swap_file import SwapFile
from zero.tiers.tier import ON_HOST, Disk, Tier
from zero.tiers.values import Column


class Movable(Protocol):
    """State that may leave the device."""

    def relieve(self, nbytes: int) -> int:
        """Move state to the host until about `nbytes` are free, if possible; return the bytes moved."""


class Stores:
    """One for each engine.

    host: what the host's tier amounts to: if the device is the host, it is the device's memory, and nothing
    is there twice. transfers: where copies between device and host are timed.
    """

    def __init__(self, accelerator: Accelerator, offload: Offload, transfers: Transfers) -> None:
        self.transfers = transfers
        self.accelerator = accelerator
        self.offload = offload
        self.host = ON_HOST.on(accelerator)
        self.pipeline = Pipeline(accelerator.memory)
        self._copied: Counter[str] = Counter()
        self._swap_files: dict[Tier, SwapFile] = {}
        self._movable: list[weakref.ref[Movable]] = []  # which hold these stores

    @cached_property
    def carrier(self) -> Carrier:
        """The carrier, made when something moves for the first time, as it takes a stream."""
        return self.new_carrier()

    def new_carrier(self) -> Carrier:
        """A carrier with streams of its own."""
        return Carrier(self.accelerator, self._copied, self.transfers)

    def count_move(self, where: str, nbytes: int) -> None:
        """Count what is moved past the carriers; see `moved`."""
        self._copied[where] += nbytes

    @property
    def moved(self) -> Counter[str]:
        """Bytes moved between tiers so far, such as "to host" or "from disk"."""
        found = self._copied.copy()
        for file in self._swap_files.values():
            found += Counter({"from disk": file.bytes_read, "to disk": file.bytes_written})
        return found

    @property
    def busy(self) -> Counter[str]:
        """Nanoseconds in which the disk had something to do so far, "from disk" and "to disk"."""
        return sum((file.busy for file in self._swap_files.values()), Counter[str]())

    @cached_property
    def read_ahead(self) -> ReadAhead:
        """Reads parameters on disk before their gathers."""
        return ReadAhead(self.accelerator)

    def swap_file(self, tier: Disk) -> SwapFile:
        """Return the file of a tier, made when it is asked for first."""
        if tier not in self._swap_files:
            self._swap_files[tier] = SwapFile(tier.folder(self.offload))
        return self._swap_files[tier]

    def kernels(self, device: torch.device) -> Kernels:
        """Return the kernels for tensors on `device`: the accelerator's, or the host's."""
        return self.accelerator.kernels if device == self.accelerator.device else self._host_kernels

    @cached_property
    def _host_kernels(self) -> Kernels:
        return accelz.host_kernels()

    def may_move(self, state: Movable) -> None:
        """Have `relieve` move this state too, after what it has been given before."""
        self._movable.append(weakref.ref(state))

    def relieve(self, nbytes: int) -> int:
        """Free about that many bytes of the device, if possible; return how many."""
        freed = 0
        for state in filter(None, (found() for found in self._movable)):
            freed += state.relieve(nbytes - freed) if freed < nbytes else 0
        return freed

    def disk_bytes(
        self, numel: int, dtype: torch.dtype, placement: Placement, gradient: torch.dtype
    ) -> Counter[Tier]:
        """Return the bytes on each disk of a group of `numel` elements in `dtype`.

        gradient: its reduced slice's dtype.
        """
        found = Counter[Tier]()
        parts = [(n, tier, placement.columns) for n, tier in placement.optimizer]
        parts += [
            (numel, placement.params, (Column(dtype),)),
            (numel, placement.gradients, (Column(gradient),)),
        ]
        for n, tier, columns in parts:
            found[tier] += tier.nbytes(n, *columns) if tier.stored else 0
        return +found

    def reserve(self, nbytes: Mapping[Tier, int]) -> bool:
        """Reserve the space for all of this engine's state on disk. Raises OffloadError on a full disk.

        Return whether a file system reads and writes through the page cache.
        """
        files = {self.swap_file(tier): needed for tier, needed in nbytes.items() if isinstance(tier, Disk)}
        for file, needed in files.items():
            file.reserve(needed)
        return not all(file.past_cache for file in files)

    def join(self) -> None:
        """Make the device's later work wait for everything that is under way to it."""
        if "carrier" in self.__dict__:
            self.carrier.join()
