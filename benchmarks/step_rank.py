"""One rank of one peer, as it lives in its process."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import time
from dataclasses import dataclass

from benchmarks import model, peers

POOL = 4  # batches that a rank trains on in turn: few enough that a working peer's loss falls


@dataclass(frozen=True)
class Turn:
    """What one rank did. seconds: of the timed steps. losses: of all steps, warm-up included."""

    seconds: list[float]
    losses: list[float]


class StepRank:
    """Built empty (imports only), so that the imported process can be measured before the peer is."""

    def __init__(self, name: str, size: str, length: int, setting: peers.Setting) -> None:
        self._name = name
        self._size = size
        self._length = length
        self._setting = setting
        self._steps = 0
        peers.prepare(name)

    def build(self) -> None:
        """Make the model, hand it to the peer, and give back what building left behind."""
        rank = int(os.environ["RANK"])
        self._batches = model.make_batches(self._size, self._setting.batch, self._length, rank, POOL)
        self._peer = peers.PEERS[self._name](model.build(self._size, self._length), self._setting)
        gc.collect()
        if sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)

    def run(self, warm: int, timed: int) -> Turn:
        """`warm` steps, then `timed` more that are timed."""
        seconds, losses = [], []
        for _ in range(warm + timed):
            inputs, targets = self._batches[self._steps % POOL]
            self._steps += 1
            start = time.perf_counter()
            losses.append(self._peer.step(inputs, targets))
            seconds.append(time.perf_counter() - start)
        return Turn(seconds[warm:], [loss.item() for loss in losses])

    def traffic(self) -> dict[str, float] | None:
        """Bytes per step by kind of collective; None if the peer does not count."""
        moved = self._peer.traffic()
        return None if moved is None else {kind: size / self._steps for kind, size in moved.items()}
