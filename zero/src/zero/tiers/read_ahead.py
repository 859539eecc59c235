"""Read parameters on disk into page-locked host memory before their gather asks for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from accelz import Accelerator, Event
from zero.tiers.swap_file import THREADS, TRANSFER_BLOCK, Section, Transfer
from zero.tiers.values import bytes_of

LIMIT = 2 * THREADS * TRANSFER_BLOCK  # bytes read before they are needed: enough to keep a disk busy
DEPTH = 2 * THREADS  # units considered for it; small ones are one block each


@dataclass
class _Reading:
    """A read under way or done. changes: the section's when it began; more since then make it stale."""

    section: Section
    buffer: Tensor
    transfer: Transfer
    changes: int

    @property
    def values(self) -> Tensor:
        nbytes = self.section.numel() * self.section.element_size()
        return self.buffer[:nbytes].view(self.section.dtype)


class ReadAhead:
    """Reads sections ahead; at most `limit` bytes wait to be used, or one section that is larger.

    in_time: number of reads so far that had begun when they were asked for. late: number that had not.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.limit = LIMIT
        self.in_time = 0
        self.late = 0
        self._accelerator = accelerator
        self._readings: dict[int, _Reading] = {}  # by place
        self._free: list[tuple[Tensor, Event]] = []  # with the end of their last use

    @property
    def waiting_bytes(self) -> int:
        """Bytes that are read or being read, and not used yet."""
        return sum(r.values.nbytes for r in self._readings.values())

    def begin(self, section: Section) -> bool:
        """Begin to read if there is room; return whether the section is being read."""
        if section.place in self._readings:
            return True
        nbytes = section.numel() * section.element_size()
        if self._readings and self.waiting_bytes + nbytes > self.limit:
            return False
        self._readings[section.place] = self._start(section)
        return True

    @contextmanager
    def use(self, section: Section) -> Iterator[Tensor]:
        """Yield the values on the host, (numel,).

        Copies queued in the block, on the current stream, may run later.
        Raises OffloadError if they could not be read.
        """
        reading = self._ready(section)
        try:
            reading.transfer.wait()
            yield reading.values
        finally:
            self._give_back(reading)

    def clear(self) -> None:
        """Forget what was read but not used."""
        while self._readings:
            self._give_back(self._readings.popitem()[1])

    def _ready(self, section: Section) -> _Reading:
        reading = self._readings.pop(section.place, None)
        if reading is not None and reading.changes == section.changes:
            self.in_time += 1
            return reading
        if reading is not None:
            self._give_back(reading)
        self.late += 1
        return self._start(section)

    def _start(self, section: Section) -> _Reading:
        nbytes = section.numel() * section.element_size()
        buffer, changes = self._buffer(nbytes), section.changes
        transfer = section.file.read_cached(section.place, bytes_of(buffer[:nbytes]))
        return _Reading(section, buffer, transfer, changes)

    def _buffer(self, nbytes: int) -> Tensor:
        """Return the smallest free buffer that is large enough, or a new one."""
        sizes = {
            i: b.numel() for i, (b, used) in enumerate(self._free) if b.numel() >= nbytes and used.done()
        }
        if sizes:
            return self._free.pop(min(sizes, key=sizes.__getitem__))[0]
        return self._accelerator.memory.empty_host((nbytes,), torch.uint8)

    def _give_back(self, reading: _Reading) -> None:
        reading.transfer.drain()
        self._free.append((reading.buffer, self._accelerator.streams.current().record()))
        while len(self._free) > 1 and sum(buffer.numel() for buffer, _ in self._free) > self.limit:
            self._free.pop(0)[1].synchronize()
