"""One rank of one peer, in its own process."""

from __future__ import annotations

import ctypes
import gc
import math
import os
import sys
import time
from dataclasses import dataclass

from torch import Tensor

import accelz
from accelz import Accelerator
from benchmarks import compiled_peers, host_peers, loop_peers, mesh_peers, model, offload_peers, peers

POOL = 4  # batches that a rank trains on in turn, few enough for a working peer's loss to fall


@dataclass(frozen=True)
class Turn:
    """One rank's measurements.

    seconds: of the timed steps. losses: of all steps, warm-up included. peak: bytes of device memory, None
    if the device does not count it.
    """

    seconds: list[float]
    losses: list[float]
    peak: int | None


class StepRank:
    """One rank. It is built empty, with imports only, so that the process can be measured before the peer."""

    def __init__(self, device: str, name: str, size: str, length: int, setting: peers.Setting) -> None:
        self._device = device
        self._name = name
        self._size = size
        self._length = length
        self._setting = setting
        self._steps = 0
        peers.prepare(name)

    def room(self) -> int:
        """Bytes of free device memory for each rank that shares the device."""
        accelerator = self._bound()
        sharing = math.ceil(self._setting.ranks / accelerator.device_count())
        return accelerator.memory.stats().free // sharing

    def build(self) -> None:
        """Make the model, pass it to the peer, and release the memory that building left behind."""
        rank = mesh_peers.data_rank(self._name, int(os.environ["RANK"]))
        accelerator = self._accelerator = self._bound()
        batches = model.make_batches(self._size, self._setting.batch, self._length, rank, POOL)
        self._batches = [(x.to(accelerator.device), y.to(accelerator.device)) for x, y in batches]
        zeros = mesh_peers.PEERS | loop_peers.PEERS | offload_peers.PEERS | compiled_peers.PEERS
        every = peers.PEERS | zeros | compiled_peers.ON_REQUEST | host_peers.PEERS
        make = every[self._name]
        with accelerator.device:  # on a host, random numbers for a large model take half a minute
            network = model.build(self._size, self._length)
        self._peer = make(network, self._setting)
        gc.collect()
        if sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)

    def run(self, warm: int, timed: int) -> Turn:
        """Do `warm` untimed steps, then `timed` timed ones.

        These are timed one by one, or all together on an asynchronous device, so that the host may run ahead
        as it does in training.
        """
        exact = self._accelerator.capabilities.exact_memory
        if exact:
            self._accelerator.memory.reset_peak()
        losses = [self._step() for _ in range(warm)]
        together = self._accelerator.capabilities.asynchronous
        seconds = []
        for count in [timed] if together and timed else [1] * timed:
            self._accelerator.streams.synchronize()
            start = time.perf_counter()
            losses += [self._step() for _ in range(count)]
            self._accelerator.streams.synchronize()
            seconds.append((time.perf_counter() - start) / count)
        peak = self._accelerator.memory.stats().peak if exact else None
        return Turn(seconds, [loss.item() for loss in losses], peak)

    def _bound(self) -> Accelerator:
        accelerator = accelz.use(self._device)
        accelerator.bind(int(os.environ["LOCAL_RANK"]))
        return accelerator

    def _step(self, length: int | None = None) -> Tensor:
        """length: tokens of each sequence that are used, from the first; None for all."""
        batch = self._batches[self._steps % POOL]
        self._steps += 1
        return self._peer.step(*(batch if length is None else (t[:, :length].contiguous() for t in batch)))

    def traffic(self) -> dict[str, float] | None:
        """Bytes per step by kind of collective; None if the peer does not count."""
        moved = self._peer.traffic()
        return None if moved is None else {kind: size / self._steps for kind, size in moved.items()}
