"""Files of torch.save, described without torch, without reading tensors and without running anything in them.

Such a file is a zip of uncompressed records: one pickle, and one record for each tensor's storage. Tensors
are described by their places, so that their bytes can be read by offset when they are needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from zero.errors import CheckpointError, CorruptCheckpointError
from zero.files.boundary import typed
from zero.files.boxes import span
from zero.files.storage import DISK
from zero.sources import inert_pickle, zip_directory
from zero.sources.inert_pickle import MOST_STEPS, TENSORS, StoredTensor
from zero.sources.zip_directory import FileRecord

_LARGEST_PICKLE = 1 << 25  # bytes; the objects in it may take a hundred times as much
_NOT_ONE = "is truncated or not a torch.save file (files of torch before 1.6 are not supported)"
_NUMBERS = {"F64": "f8", "F32": "f4", "F16": "f2", "I64": "i8", "I32": "i4"}


class TorchFile:
    """A file of torch.save. content: the object that was saved, with a StoredTensor for each tensor.

    stand_ins: for further classes than those of tensors and plain containers, by full name. start, nbytes:
    where it is in a larger file. strangers: whether it may hold other classes, which are not read. most:
    steps that reading its pickle may take. Raises CheckpointError for a file that is missing or not of this
    kind, or that holds other classes, and CorruptCheckpointError for one that is truncated or makes no sense.
    """

    def __init__(
        self,
        path: Path,
        stand_ins: Mapping[str, Any],
        start: int = 0,
        nbytes: int | None = None,
        strangers: bool = False,
        most: int = MOST_STEPS,
    ) -> None:
        self.path = path
        self.records = records_of(path, start, nbytes)
        self._by_name = {record.name.partition("/")[2]: record for record in self.records}
        if "byteorder" in self._by_name and self._read("byteorder") != b"little":
            raise CheckpointError(f"{path} was saved on a big-endian machine, which is not supported")
        known = {**TENSORS, **stand_ins}
        self.content = inert_pickle.load(self._read("data.pkl"), known, path, strangers, most)

    def locate(self, tensor: StoredTensor) -> tuple[FileRecord, int]:
        """The record that holds a tensor of `content`, and the tensor's offset in it, in bytes."""
        record = self._by_name.get(f"data/{tensor.storage}")
        end = (tensor.offset + span(tensor.shape, tensor.stride)) * tensor.item_bytes
        if record is None or end > record.nbytes:
            raise CorruptCheckpointError(f"{self.path}: its tensors and its records do not match")
        return record, tensor.offset * tensor.item_bytes

    def number(self, tensor: StoredTensor) -> float:
        """The value of a tensor with one element."""
        if tensor.numel != 1 or tensor.dtype not in _NUMBERS:
            raise CorruptCheckpointError(f"{self.path}: what should be a number is a tensor of another kind")
        record, offset = self.locate(tensor)
        data = _bytes_at(self.path, record.offset + offset, tensor.item_bytes)
        (value,) = np.frombuffer(data, _NUMBERS[tensor.dtype])
        return float(value)

    def _read(self, name: str) -> bytes:
        """The bytes of a small record."""
        record = self._by_name.get(name)
        if record is None or record.nbytes > _LARGEST_PICKLE:
            raise CorruptCheckpointError(
                f"{self.path} is not a torch.save file: its {name} is missing, or larger than "
                f"{_LARGEST_PICKLE} bytes"
            )
        data = _bytes_at(self.path, record.offset, record.nbytes)
        if record.crc not in (None, crc32(data)):
            raise CorruptCheckpointError(f"{self.path} is damaged: the checksum of {name} does not match")
        return data


def records_of(path: Path, start: int = 0, nbytes: int | None = None) -> list[FileRecord]:
    """The records of a zip: a whole file, or `nbytes` of one from `start` on. Raises as TorchFile does."""
    with typed(path, _NOT_ONE), closing(DISK.open(path)) as file:
        whole = file.size()
        size = whole if nbytes is None else nbytes
        if start < 0 or size < 0 or start + size > whole:
            raise ValueError(f"it has {whole} bytes, not {start + size}")

        def read(at: int, count: int) -> bytes:
            return file.read_bytes(start + at, max(0, min(count, size - at)))

        found = zip_directory.records(read, size)
        return [replace(record, offset=start + record.offset) for record in found] if start else found


def _bytes_at(path: Path, offset: int, nbytes: int) -> bytes:
    """Bytes of a file. Raises as TorchFile does."""
    with typed(path), closing(DISK.open(path)) as file:
        data = file.read_bytes(offset, nbytes)
    if len(data) < nbytes:
        raise CorruptCheckpointError(f"{path} is truncated: it ends at byte {offset + len(data)}")
    return data
