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

import numpy as np

from zero.errors import CorruptCheckpointError, some
from zero.files.boundary import typed
from zero.files.boxes import Box, boxes, count_stretches, read_box, stretches
from zero.files.manifest import ITEM_BYTES, is_row_major
from zero.files.storage import DISK, File
from zero.sources import crc
from zero.sources.inert_pickle import StoredTensor
from zero.sources.source import Chunk, Fragment, Source
from zero.sources.torch_file import TorchFile
from zero.sources.zip_directory import FileRecord

_MOST_STRETCHES = 16


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


class Mosaic:
    """A tensor that is put together from parts, a box of it at a time."""

    def __init__(self, tensor: int, shape: tuple[int, ...], parts: Sequence[StoredBox]) -> None:
        self.tensor = tensor
        self.shape = shape
        self.parts = parts
        size = len(parts), len(shape)
        self._lower = np.array([part.box.lower for part in parts], np.int64).reshape(size)
        self._upper = np.array([part.box.upper for part in parts], np.int64).reshape(size)

    def within(self, box: Box) -> Iterator[tuple[StoredBox, Box]]:
        """The parts that a box meets, each with what they have in common."""
        meets = (np.maximum(self._lower, box.lower) < np.minimum(self._upper, box.upper)).all(axis=1)
        for number in np.flatnonzero(meets).tolist():
            yield self.parts[number], self.parts[number].box.meets(box)


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
        self._mosaics: list[Mosaic] = []
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
        self,
        tensor: int,
        start: int,
        file: TorchFile,
        values: StoredTensor,
        first: int = 0,
        length: int | None = None,
    ) -> None:
        """Register where a stretch of a tensor is stored.

        The tensor's elements from `start` on are elements `first` to `first + length` of `values` in `file`;
        length None: to their end. A stretch without elements is ignored.
        """
        length = values.numel - first if length is None else length
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
            self._mosaics.append(Mosaic(tensor, values.shape, [part]))

    def place_parts(self, tensor: int, parts: Sequence[StoredBox]) -> None:
        """Register that a tensor consists of parts, which together are all of it."""
        shape = self.tensors[tensor].shape
        if not all(is_row_major(p.box.sizes, p.stride) and _is_short(p.box, shape) for p in parts):
            self._mosaics.append(Mosaic(tensor, shape, parts))
            return
        for part in parts:
            offset = part.offset
            for start, length in stretches(part.box, shape):
                self.place_stretch(tensor, *part.key, start, length, offset)
                offset += length * ITEM_BYTES[self.tensors[tensor].dtype]

    def chunks(self, wanted: Collection[int], limit: int) -> Iterator[Chunk]:
        mosaics = [mosaic for mosaic in self._mosaics if mosaic.tensor in wanted]
        for mosaic in mosaics:
            yield from self._boxes(mosaic, limit)
        turned = {part.key for mosaic in mosaics for part in mosaic.parts}
        for key in self._records:
            places = [place for place in self._places.get(key, ()) if place.tensor in wanted]
            if places or key in turned:
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
                item = self._item(place)
                first = max(0, low - place.offset) // item
                last = min(place.length, (high - place.offset) // item)
                if last > first:
                    at = place.offset + first * item - low
                    pieces.append(Fragment(place.tensor, place.start + first, last - first, at))
            yield Chunk(high - low, partial(self._read, key, low, high - low), tuple(pieces))

    def _boxes(self, mosaic: Mosaic, limit: int) -> Iterator[Chunk]:
        item = self._item(mosaic)
        for box in boxes(mosaic.shape, max(1, limit // 3 // item)):  # three copies exist at once
            ((start, length),) = stretches(box, mosaic.shape)
            piece = Fragment(mosaic.tensor, start, length, 0)
            yield Chunk(length * item, partial(self._read_mosaic, mosaic, box), (piece,))

    def _item(self, place: Place | Mosaic) -> int:
        return ITEM_BYTES[self.tensors[place.tensor].dtype]

    def _end(self, place: Place) -> int:
        return place.offset + place.length * self._item(place)

    def _read_mosaic(self, mosaic: Mosaic, box: Box, pages: memoryview) -> memoryview:
        item = self._item(mosaic)
        values = pages[: box.numel * item]
        wanted = np.frombuffer(values, f"u{item}").reshape(box.sizes)
        for part, common in mosaic.within(box):
            read = partial(self._read_part, part, item)
            room = wanted[common.seen_from(box).slices]
            read_box(common.seen_from(part.box), part.stride, item, read, room)
        return values

    def _read_part(self, part: StoredBox, item: int, start: int, into: memoryview) -> None:
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
        held += [self.tensors[m.tensor].name for m in self._mosaics if any(p.key == key for p in m.parts)]
        if not held:
            return "no weights"
        return some([repr(name) for name in held], 4)


def _is_short(box: Box, shape: tuple[int, ...]) -> bool:
    """Whether a box is a few stretches of its tensor, so that listing them takes little."""
    return count_stretches(box, shape) <= _MOST_STRETCHES
