"""Files of torch.save, described without torch, without reading tensors and without running anything in them.

Such a file is a zip of uncompressed records: one pickle, and one record for each tensor's storage. Tensors
are described by their places, so that their bytes can be read by offset when they are needed.
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any
from zlib import crc32

import numpy as np

from zero.errors import CheckpointError, CorruptCheckpointError
from zero.sources import inert_pickle
from zero.sources.inert_pickle import TENSORS, StoredTensor
from zero.sources.memory_order import span

_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, lengths of the name and of the extra field
_LARGEST_PICKLE = 1 << 25  # bytes; the objects in it may take a hundred times as much
_NUMBERS = {"F64": "f8", "F32": "f4", "F16": "f2", "I64": "i8", "I32": "i4"}


@dataclass(frozen=True)
class Record:
    """A record of a zip. offset: of its first byte in the file. crc: its CRC-32, or None if it has none."""

    name: str
    offset: int
    nbytes: int
    crc: int | None


class TorchFile:
    """A file of torch.save. content: the object that was saved, with a StoredTensor for each tensor.

    stand_ins: for further classes than those of tensors and plain containers, by full name. start, nbytes:
    where it is in a larger file. strangers: whether it may hold other classes, which are not read. Raises
    CheckpointError for a file that is missing or not of this kind, or that holds other classes, and
    CorruptCheckpointError for one that is truncated or makes no sense.
    """

    def __init__(
        self,
        path: Path,
        stand_ins: Mapping[str, Any],
        start: int = 0,
        nbytes: int | None = None,
        strangers: bool = False,
    ) -> None:
        self.path = path
        self.records = records_of(path, start, nbytes)
        self._by_name = {record.name.partition("/")[2]: record for record in self.records}
        if "byteorder" in self._by_name and self._read("byteorder") != b"little":
            raise CheckpointError(f"{path} was saved on a big-endian machine, which is not supported")
        known = {**TENSORS, **stand_ins}
        self.content = inert_pickle.load(self._read("data.pkl"), known, path, strangers)

    def locate(self, tensor: StoredTensor) -> tuple[Record, int]:
        """The record that holds a tensor of `content`, and the tensor's offset in it, in bytes."""
        record = self._by_name.get(f"data/{tensor.storage}")
        end = (tensor.offset + span(tensor.shape, tensor.stride)) * tensor.item_bytes
        if record is None or end > record.nbytes:
            raise CorruptCheckpointError(f"{self.path}: its tensors and its records do not match")
        return record, tensor.offset * tensor.item_bytes

    def number(self, tensor: StoredTensor) -> float:
        """The value of a tensor with one element."""
        record, offset = self.locate(tensor)
        with self.path.open("rb") as file:
            file.seek(record.offset + offset)
            (value,) = np.frombuffer(file.read(tensor.item_bytes), _NUMBERS[tensor.dtype])
            return float(value)

    def _read(self, name: str) -> bytes:
        """The bytes of a small record."""
        record = self._by_name.get(name)
        if record is None or record.nbytes > _LARGEST_PICKLE:
            raise CorruptCheckpointError(
                f"{self.path} is not a torch.save file: its {name} is missing, or larger than "
                f"{_LARGEST_PICKLE} bytes"
            )
        with self.path.open("rb") as file:
            file.seek(record.offset)
            data = file.read(record.nbytes)
        if record.crc not in (None, crc32(data)):
            raise CorruptCheckpointError(f"{self.path} is damaged: the checksum of {name} does not match")
        return data


def records_of(path: Path, start: int = 0, nbytes: int | None = None) -> list[Record]:
    """The records of a zip: a whole file, or `nbytes` of one from `start` on. Raises as TorchFile does."""
    try:
        with path.open("rb") as file:
            whole = path.stat().st_size
            size = whole if nbytes is None else nbytes
            if start < 0 or size < 0 or start + size > whole:
                raise ValueError(f"it has {whole} bytes, not {start + size}")
            window = file if size == whole else Window(file, start, size)
            return [replace(record, offset=start + record.offset) for record in _records(path, window, size)]
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except (zipfile.BadZipFile, struct.error, ValueError, NotImplementedError) as error:
        raise CorruptCheckpointError(
            f"{path} is truncated or not a torch.save file (files of torch before 1.6 are not supported): "
            f"{error}"
        ) from error


class Window(io.RawIOBase):
    """A part of a file as a readable file of its own."""

    def __init__(self, file: IO[bytes], start: int, size: int) -> None:
        self._file = file
        self._start = start
        self._size = size
        self._position = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError(f"there is no byte {base + offset}")
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, count: int = -1) -> bytes:
        left = max(0, self._size - self._position)
        self._file.seek(self._start + self._position)
        data = self._file.read(left if count < 0 else min(count, left))
        self._position += len(data)
        return data


def _records(path: Path, file: IO[bytes] | Window, size: int) -> Iterator[Record]:
    with zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            if entry.compress_type != zipfile.ZIP_STORED:
                raise CorruptCheckpointError(
                    f"{path}: {entry.filename!r} is compressed, which torch.save never does"
                )
            file.seek(entry.header_offset)
            signature, name, extra = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
            offset = entry.header_offset + _LOCAL_HEADER.size + name + extra
            if signature != b"PK\3\4" or offset + entry.file_size > size:
                raise CorruptCheckpointError(f"{path}: the record {entry.filename!r} extends past its end")
            summed = entry.CRC or not entry.file_size  # torch writes zero where it takes none
            yield Record(entry.filename, offset, entry.file_size, entry.CRC if summed else None)
