"""Records from the disk, stepped in memory and written back, in three overlapping stages."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from accelz.flat_buffer import HOST
from accelz.memory import Memory
from zero.tiers.host_memory import bytes_of
from zero.tiers.record import Opened, Record, section_bytes
from zero.tiers.split import SplitMaster
from zero.tiers.swap_file import Transfer, whole_pages

BUFFERS = 3  # one fills, one is worked on, one is written: at no time is a fourth wanted


class Pipeline:
    """Three buffers of the largest record that has passed, for all records of an engine."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._buffers: list[Tensor] = []
        self._scratch: Tensor | None = None
        self._writes: list[Transfer | None] = [None] * BUFFERS

    def through(self, records: Sequence[Record]) -> Generator[Opened, None, None]:
        """Each record in turn, in memory; what its user changed is written when the next one is asked for.

        The first read begins at once. All writes are complete when the iterator is exhausted.
        """
        self._fit(max((_nbytes(record) for record in records), default=0))
        begun = self._begin_read(records[0], 0) if records else None
        return self._run(records, begun)

    def _run(self, records: Sequence[Record], reading: Transfer | None) -> Generator[Opened, None, None]:
        try:
            for turn, record in enumerate(records):
                assert reading is not None
                reading.wait()
                following = records[turn + 1] if turn + 1 < len(records) else None
                reading = self._begin_read(following, turn + 1) if following else None
                sections = self._views(record, turn)
                state = record.unpack(sections, self._scratch_for(record))
                yield state
                record.pack(state, sections)
                self._writes[turn % BUFFERS] = record.sections[0].file.write(
                    record.sections[0].place, self._bytes(record, turn)
                )
        finally:
            self._settle(reading)

    def _begin_read(self, record: Record, turn: int) -> Transfer:
        """Into the buffer of the turn three before, which has been written by now or is waited for."""
        self._finish_write(turn % BUFFERS)
        first = record.sections[0]
        return first.file.read(first.place, self._bytes(record, turn))

    def _settle(self, reading: Transfer | None) -> None:
        """Wait for everything under way, also where the records' user gave up, and only then raise."""
        under_way = [transfer for transfer in (*self._writes, reading) if transfer is not None]
        self._writes = [None] * BUFFERS
        for transfer in under_way:
            transfer.settle()
        for transfer in under_way:
            transfer.wait()

    def _finish_write(self, index: int) -> None:
        writing, self._writes[index] = self._writes[index], None
        if writing is not None:
            writing.wait()

    def _views(self, record: Record, turn: int) -> list[Tensor]:
        buffer, begin, views = self._buffers[turn % BUFFERS], 0, []
        for section in record.sections:
            nbytes = section.numel() * section.element_size()
            views.append(buffer[begin : begin + nbytes].view(section.dtype))
            begin += section_bytes(section.numel(), section.dtype)
        return views

    def _scratch_for(self, record: Record) -> Tensor | None:
        """Memory for a master that is in two places."""
        if not isinstance(record.master, SplitMaster):
            return None
        numel = record.master.numel()
        if self._scratch is None or self._scratch.numel() < numel:
            self._scratch = torch.empty(numel, dtype=torch.float32, device=HOST)
        return self._scratch[:numel]

    def _bytes(self, record: Record, turn: int) -> memoryview:
        return bytes_of(self._buffers[turn % BUFFERS][: _nbytes(record)])

    def _fit(self, nbytes: int) -> None:
        if nbytes and (not self._buffers or self._buffers[0].numel() < nbytes):
            self._buffers.clear()
            self._buffers = [whole_pages(self._memory, nbytes) for _ in range(BUFFERS)]


def _nbytes(record: Record) -> int:
    return sum(section_bytes(s.numel(), s.dtype) for s in record.sections)
