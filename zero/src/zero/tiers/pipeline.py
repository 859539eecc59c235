"""Read records from disk, step them in memory and write them back, in three overlapping stages."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from torch import Tensor

from accelz import Memory
from zero.tiers.swap_file import Transfer, section_bytes, whole_pages
from zero.tiers.tier import Opened, Record
from zero.tiers.values import bytes_of

BUFFERS = 3  # one is read, one stepped, one written: a fourth is never needed


class Pipeline:
    """Three buffers, each of the size of the largest record so far, for all records of an engine."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._buffers: list[Tensor] = []
        self._writes: list[Transfer | None] = [None] * BUFFERS

    def through(self, records: Sequence[Record]) -> Generator[Opened, None, None]:
        """Yield each record in turn, in memory; write its changes when the next one is requested.

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
                master, *moments = self._views(record, turn)
                yield Opened(master, tuple(moments))
                self._writes[turn % BUFFERS] = record.sections[0].file.write(
                    record.sections[0].place, self._bytes(record, turn)
                )
        finally:
            self._drain(reading)

    def _begin_read(self, record: Record, turn: int) -> Transfer:
        """Begin to read into the buffer of three turns before, waiting until that has been written."""
        writing, self._writes[turn % BUFFERS] = self._writes[turn % BUFFERS], None
        if writing is not None:
            writing.wait()
        first = record.sections[0]
        return first.file.read(first.place, self._bytes(record, turn))

    def _drain(self, reading: Transfer | None) -> None:
        """Wait for everything under way, even if the records' user gave up, and only then raise."""
        under_way = [transfer for transfer in (*self._writes, reading) if transfer is not None]
        self._writes = [None] * BUFFERS
        for transfer in under_way:
            transfer.drain()
        for transfer in under_way:
            transfer.wait()

    def _views(self, record: Record, turn: int) -> list[Tensor]:
        buffer, begin, views = self._buffers[turn % BUFFERS], 0, []
        for section in record.sections:
            nbytes = section.numel() * section.element_size()
            views.append(buffer[begin : begin + nbytes].view(section.dtype))
            begin += section_bytes(section.numel(), section.dtype)
        return views

    def _bytes(self, record: Record, turn: int) -> memoryview:
        return bytes_of(self._buffers[turn % BUFFERS][: _nbytes(record)])

    def _fit(self, nbytes: int) -> None:
        if nbytes and (not self._buffers or self._buffers[0].numel() < nbytes):
            self._buffers.clear()
            self._buffers = [whole_pages(self._memory, nbytes) for _ in range(BUFFERS)]


def _nbytes(record: Record) -> int:
    return sum(section_bytes(s.numel(), s.dtype) for s in record.sections)
