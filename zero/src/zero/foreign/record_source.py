"""Weights that lie in records of files: stretches with a checksum each, read from end to end."""

from __future__ import annotations

import math
import threading
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from zero.checkpoint.manifest import ITEM_BYTES
from zero.checkpoint.storage import DISK, File, Storage
from zero.consolidate.memory_order import Box, boxes
from zero.consolidate.source import Chunk, Piece, Source
from zero.errors import CheckpointError, CorruptCheckpointError, ZeroError
from zero.foreign import crc
from zero.foreign.torch_file import Record, TorchFile

ReadBox = Callable[[Box, memoryview], None]


class Place(NamedTuple):
    """A stretch of a tensor in a record. start, length: elements. offset: bytes from the record's begin."""

    offset: int
    tensor: int
    start: int
    length: int


class Key(NamedTuple):
    """A record of a file, by the file's path."""

    path: Path
    record: Record


class RecordSource(Source):
    """What sources made of records have in common; a subclass says what lies where.

    Raises CheckpointError for what is missing, CorruptCheckpointError for what makes no sense.
    """

    def __init__(self, path: Path, storage: Storage = DISK) -> None:
        self.path = path
        self._storage = storage
        self._open: dict[Path, File] = {}
        self._records: dict[Key, None] = {}
        self._places: dict[Key, list[Place]] = {}
        self._loose: dict[int, tuple[Key, ReadBox]] = {}
        self._found: dict[Key, dict[int, tuple[int, int]]] = {}  # length and CRC of every chunk, by its begin
        self._lock = threading.Lock()
        try:
            self.describe()
        except ZeroError:
            self.close()
            raise
        except Exception as error:  # anything may stand anywhere in a file that was made to harm
            self.close()
            what = f"{type(error).__name__}: {error}"
            raise CorruptCheckpointError(f"{path} is not laid out as {self.format} is: {what}") from error

    @abstractmethod
    def describe(self) -> None:
        """Set `tensors`, `facts`, `identity` and `left_out`, add the files, and say what lies where."""

    def add_file(self, path: Path, records: Iterable[Record]) -> None:
        """Open a file for reading its records."""
        try:
            self._open[path] = self._storage.open(path)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        self._records.update({Key(path, record): None for record in records})

    def place_stretch(
        self, tensor: int, path: Path, record: Record, start: int, length: int, offset: int = 0
    ) -> None:
        """Say that a record has elements `start` to `start + length` of a tensor, from byte `offset` on."""
        if length:
            place = Place(offset, tensor, start, length)
            self._places.setdefault(Key(path, record), []).append(place)

    def place_boxes(self, tensor: int, path: Path, record: Record, read: ReadBox) -> None:
        """Say that a record has a tensor in another order than row-major. read: fills bytes with a box."""
        self._loose[tensor] = Key(path, record), read

    def place(
        self,
        tensor: int,
        start: int,
        file: TorchFile,
        values: Tensor,
        first: int = 0,
        length: int | None = None,
    ) -> None:
        """Say that elements `first` to `first + length` of `values` are elements of a tensor from `start` on.

        values: mapped from `file`. Without elements it is nothing.
        """
        length = values.numel() - first if length is None else length
        if not length:
            return
        record, offset = file.locate(values)
        if values.is_contiguous():
            offset += first * values.element_size()
            self.place_stretch(tensor, file.path, record, start, length, offset)
        else:
            self.place_boxes(tensor, file.path, record, partial(_copy_box, values))

    def read_part(self, path: Path, record: Record, low: int, into: memoryview) -> None:
        """Fill bytes from byte `low` of a record on, for place_boxes(); not counted for the checksum."""
        self._fill(Key(path, record), low, into)

    def chunks(self, wanted: Collection[int], limit: int) -> Iterator[Chunk]:
        for index, (_, read) in self._loose.items():
            if index in wanted:
                item = ITEM_BYTES[self.tensors[index].dtype]
                for box in boxes(
                    self.tensors[index].shape, max(1, limit // 2 // item)
                ):  # there are two copies
                    count = math.prod(box.sizes)
                    yield Chunk(count * item, partial(read, box), (Piece(index, box.start, count, 0),))
        loose = {key for index, (key, _) in self._loose.items() if index in wanted}
        for key in self._records:
            places = [place for place in self._places.get(key, ()) if place.tensor in wanted]
            if places or key in loose:
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
                    pieces.append(Piece(place.tensor, place.start + first, last - first, at))
            yield Chunk(high - low, partial(self._read, key, low), tuple(pieces))

    def _item(self, place: Place) -> int:
        return ITEM_BYTES[self.tensors[place.tensor].dtype]

    def _end(self, place: Place) -> int:
        return place.offset + place.length * self._item(place)

    def _fill(self, key: Key, low: int, into: memoryview) -> None:
        at = key.record.offset + low
        try:
            count = self._open[key.path].read(at, into)
        except OSError as error:
            raise CheckpointError(f"{key.path} cannot be read: {error}") from error
        if count < into.nbytes:
            raise CorruptCheckpointError(f"{key.path} ends at byte {at + count}, within {self._held(key)}")

    def _read(self, key: Key, low: int, into: memoryview) -> None:
        """Fill bytes, and keep their part of the record's checksum for finish()."""
        self._fill(key, low, into)
        if key.record.crc is not None:
            digest = crc32(into)
            with self._lock:
                self._found.setdefault(key, {})[low] = into.nbytes, digest

    def _held(self, key: Key) -> str:
        """Names of the tensors in a record."""
        held = [self.tensors[place.tensor].name for place in self._places.get(key, ())]
        held += [self.tensors[index].name for index, (k, _) in self._loose.items() if k == key]
        if not held:
            return "no weights"
        return ", ".join(map(repr, held[:4])) + (f" and {len(held) - 4} more" if len(held) > 4 else "")


def _copy_box(values: Tensor, box: Box, into: memoryview) -> None:
    """A box of a mapped tensor."""
    part = values
    for dimension, (low, size) in enumerate(zip(box.lower, box.sizes, strict=True)):
        part = part.narrow(dimension, low, size)
    torch.frombuffer(into, dtype=values.dtype).view(part.shape).copy_(part)
