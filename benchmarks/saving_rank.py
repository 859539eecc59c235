"""One rank of a job that trains with zero and saves, in its own process."""

from __future__ import annotations

import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

import accelz
import zero
from benchmarks import model, peers

CHUNK = 1 << 22  # bytes of a raw write
WRITERS = 4  # writing threads per rank; neither fewer nor more, nor smaller writes, were faster


class SavingRank:
    """One rank. precision: as in zero.Config; the saved state has 12 bytes per parameter in fp32 and bf16."""

    def __init__(self, size: str, length: int, batch: int, precision: str, timeout: float) -> None:
        rank = int(os.environ["RANK"])
        accelz.use("cpu").bind(int(os.environ["LOCAL_RANK"]))
        self._rank = rank
        self._batches = model.make_batches(size, batch, length, rank, 4)
        network = model.build(size, length)
        optimizer = torch.optim.AdamW(network.parameters(), **peers.ADAMW)
        config = zero.Config(stage=3, precision=precision, timeout=timeout)  # type: ignore[arg-type]
        self._engine = zero.initialize(network, optimizer, config)
        self._steps = 0
        self._raw = mmap.mmap(-1, CHUNK)
        self._raw.write(os.urandom(CHUNK))

    def train(self, steps: int, every: int, folder: str) -> float:
        """Seconds for `steps` steps with a background save every `every` (0: never), until all is saved."""
        begun = time.perf_counter()
        for number in range(steps):
            inputs, targets = self._batches[self._steps % len(self._batches)]
            self._engine.backward(self._engine(inputs, targets))
            self._engine.step()
            self._steps += 1
            if every and number % every == 0:
                self._engine.save_checkpoint(Path(folder) / f"step-{number}", async_=True, keep_last=1)
        self._engine.wait_for_checkpoint()
        return time.perf_counter() - begun

    def save(self, path: str) -> tuple[float, int]:
        """Save; returns the seconds that it took, and the bytes of this rank's file."""
        begun = time.perf_counter()
        self._engine.save_checkpoint(path)
        seconds = time.perf_counter() - begun
        return seconds, (Path(path) / f"rank-{self._rank:05d}.safetensors").stat().st_size

    def write(self, folder: str, nbytes: int) -> float:
        """Seconds for writing `nbytes` around the page cache, and for the sync after it."""
        path = Path(folder) / f"raw-{self._rank}"
        begun = time.perf_counter()
        _write_raw(path, self._raw, max(1, nbytes // CHUNK))
        seconds = time.perf_counter() - begun
        path.unlink()
        return seconds


def _write_raw(path: Path, chunk: mmap.mmap, count: int) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT)
    try:
        os.posix_fallocate(file, 0, count * CHUNK)
        with ThreadPoolExecutor(WRITERS) as writers:
            list(writers.map(lambda number: os.pwritev(file, [chunk], number * CHUNK), range(count)))
        os.fsync(file)
    finally:
        os.close(file)
