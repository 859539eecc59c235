"""Weights in records of files. A record is a stretch of a file with one checksum, read from end to end."""

from __future__ import annotations

import threading
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

from zero.errors import CorruptCheckpointError, some
from zero.files.boundary import typed
from zero.files.boxes import Block, Box, Region, count_stretches, stretches
from zero.files.manifest import is_row_major
from zero.files.storage import DISK, File
from zero.sources import crc
from zero.sources.assembled import assembled
from zero.sources.inert_pickle import StoredTensor
from zero.sources.source import Chunk, Fragment, Source
from zero.sources.torch_file import TorchFile
from zero.sources.zip_directory import FileRecord

_MOST_STRETCHES = 16  # of a box of a tensor, so that listing them takes little


class Place(NamedTuple):
    """A stretch of a tensor in a record.

    start, length: in elements. offset: in bytes, from the beginning of the record.
    """

    offset: int
    tensor: int
    start: int
    length: int


class Key(NamedTuple):
    """A record, together with the path of its file."""

    path: Path
    record: FileRecord


class StoredBox(NamedTuple):
    """A box of a tensor in a record, in any memory order.

    stride: in elements. offset: of its first element, in bytes from the beginning of the record.
    """

    box: Box
    stride: tuple[int, ...]
    key: Key
    offset: int


class RecordSource(Source):
    """The base of sources that consist of records; a subclass says what lies where.

    summed: what a checksum covers, if there are checksums. Raises CheckpointError if something is missing,
    and CorruptCheckpointError if something makes no sense.
    """

    summed = "record"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open: dict[Path, File] = {}
        self._records: dict[Key, None] = {}
        self._places: dict[Key, list[Place]] = {}
        # Of tensors that are put together from blocks. The shape is that which they make up.
        self._blocks: dict[int, tuple[tuple[int, ...], list[Block[StoredBox]]]] = {}
        self._found: dict[Key, dict[int, tuple[int, int]]] = {}  # length and CRC of each chunk, by its offset
        self._lock = threading.Lock()
        try:
            with typed(path):
                self.describe()
                self._describe_files()
        except BaseException:
            self.close()
            raise

    @property
    def sums_records(self) -> bool:
        return any(key.record.crc is not None for key in self._records)

    @abstractmethod
    def describe(self) -> None:
        """Set `tensors` and `left_out`, add the files, and say what lies where."""

    def more_facts(self) -> dict[str, Any]:
        """Further facts, besides those about the files."""
        return {}

    def _describe_files(self) -> None:
        statuses = [(path, path.stat()) for path in sorted(self._open)]
        files = [(str(path), status.st_size, status.st_mtime_ns) for path, status in statuses]
        sums = {key.record.crc is not None for key in self._records}
        self.identity = f"{self.format} {files}"
        self.facts = {
            **self.more_facts(),
            "files": len(files),
            "bytes": sum(size for _, size, _ in files),
            "checksums": f"of each {self.summed}" if sums == {True} else "none",
        }

    def add_file(self, path: Path, records: Iterable[FileRecord]) -> None:
        """Open a file of the source, to read its records."""
        with typed(path):
            self._open[path] = DISK.open(path, direct=True)
        self._records.update({Key(path, record): None for record in records})

    def place_stretch(
        self, tensor: int, path: Path, record: FileRecord, start: int, length: int, offset: int = 0
    ) -> None:
        """Register that a record holds a tensor's elements `start` to `start + length`, at byte `offset`."""
        if length:
            place = Place(offset, tensor, start, length)
            self._places.setdefault(Key(path, record), []).append(place)

    def place(
        self, tensor: int, start: int, file: TorchFile, values: StoredTensor, first: int, length: int
    ) -> None:
        """Register where a stretch of a tensor is stored.

        The tensor's elements from `start` on are elements `first` to `first + length` of `values` in `file`.
        A stretch without elements is ignored.
        """
        if not length:
            return
        record, offset = file.locate(values)
        if values.is_row_major:
            offset += first * values.item_bytes
            self.place_stretch(tensor, file.path, record, start, length, offset)
        elif start or length != values.numel:
            raise CorruptCheckpointError(f"{file.path}: a part of a tensor is not row-major")
        else:
            whole = Box((0,) * len(values.shape), values.shape)
            part = StoredBox(whole, values.stride, Key(file.path, record), offset)
            self._assemble(tensor, values.shape, [part])

    def place_parts(self, tensor: int, parts: Sequence[StoredBox]) -> None:
        """Register that a tensor consists of parts, which together are all of it."""
        shape = self.tensors[tensor].shape
        few = all(count_stretches(part.box, shape) <= _MOST_STRETCHES for part in parts)
        if not few or not all(is_row_major(part.box.sizes, part.stride) for part in parts):
            self._assemble(tensor, shape, parts)
            return
        for part in parts:
            offset = part.offset
            for start, length in stretches(part.box, shape):
                self.place_stretch(tensor, *part.key, start, length, offset)
                offset += length * self.tensors[tensor].item_bytes

    def _assemble(self, tensor: int, shape: tuple[int, ...], parts: Sequence[StoredBox]) -> None:
        blocks = [Block(part, Region(part.box.runs), part.stride) for part in parts]
        self._blocks[tensor] = shape, blocks

    def chunks(self, wanted: Collection[int], limit: int) -> Iterator[Chunk]:
        divided = [tensor for tensor in self._blocks if tensor in wanted]
        for tensor in divided:
            item = self.tensors[tensor].item_bytes
            yield from assembled(
                tensor, *self._blocks[tensor], partial(self._read_part, item), item, limit, gap=0
            )
        again = {block.key.key for tensor in divided for block in self._blocks[tensor][1]}  # for checksums
        for key in self._records:
            places = [place for place in self._places.get(key, ()) if place.tensor in wanted]
            if places or key in again:
                yield from self._of(key, sorted(places), limit)

    def everything(self, limit: int) -> Iterator[Chunk]:
        for key in self._records:
            yield from self._of(key, [], limit)

    def finish(self) -> None:
        for key, parts in self._found.items():
            if key.record.crc is None or sum(length for length, _ in parts.values()) != key.record.nbytes:
                continue
            total = 0
            for _, (length, digest) in sorted(parts.items()):
                total = crc.combine(total, digest, length)
            if total != key.record.crc:
                raise CorruptCheckpointError(
                    f"{key.path} is damaged: the checksum of its record {key.record.name!r} does not match; "
                    f"it holds {self._held(key)}"
                )

    def close(self) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()

    def _of(self, key: Key, places: list[Place], limit: int) -> Iterator[Chunk]:
        begins = [place.offset for place in places]
        passed = 0  # places that end before the chunk
        for low in range(0, key.record.nbytes, limit):
            high = min(low + limit, key.record.nbytes)
            pieces = []
            while passed < len(places) and self._end(places[passed]) <= low:
                passed += 1
            for place in places[passed : bisect_right(begins, high - 1)]:
                item = self.tensors[place.tensor].item_bytes
                first = max(0, low - place.offset) // item
                last = min(place.length, (high - place.offset) // item)
                if last > first:
                    at = place.offset + first * item - low
                    pieces.append(Fragment(place.tensor, place.start + first, last - first, at))
            yield Chunk(high - low, partial(self._read, key, low, high - low), tuple(pieces))

    def _end(self, place: Place) -> int:
        return place.offset + place.length * self.tensors[place.tensor].item_bytes

    def _read_part(self, item: int, part: StoredBox, start: int, into: memoryview) -> None:
        """Fill `into` with a part's bytes, from its element `start` in memory on."""
        key = part.key
        at = key.record.offset + part.offset + start * item
        with typed(key.path):
            count = self._open[key.path].read(at, into)
        self._check_end(key, at, count, into.nbytes)

    def _read(self, key: Key, low: int, nbytes: int, pages: memoryview) -> memoryview:
        """Read bytes of a record from `low` on, and keep their checksum for finish()."""
        at = key.record.offset + low
        with typed(key.path):
            values = self._open[key.path].read_around(at, nbytes, pages)
        self._check_end(key, at, values.nbytes, nbytes)
        if key.record.crc is not None:
            digest = crc32(values)
            with self._lock:
                self._found.setdefault(key, {})[low] = nbytes, digest
        return values

    def _check_end(self, key: Key, at: int, count: int, wanted: int) -> None:
        if count < wanted:
            raise CorruptCheckpointError(f"{key.path} ends at byte {at + count}, within {self._held(key)}")

    def _held(self, key: Key) -> str:
        """The names of the tensors in a record, for an error message."""
        held = [self.tensors[place.tensor].name for place in self._places.get(key, ())]
        held += [
            self.tensors[t].name
            for t, (_, blocks) in self._blocks.items()
            if any(b.key.key == key for b in blocks)
        ]
        if not held:
            return "no weights"
        return some([repr(name) for name in held], 4)
