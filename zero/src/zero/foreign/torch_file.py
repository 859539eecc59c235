"""Files of torch.save, described without reading their tensors and without running anything in them.

Such a file is a zip of uncompressed records: one pickle, and one record for each tensor's storage. The pickle
is read by torch's own weights-only reader, which makes nothing but tensors and plain containers; the classes
that a format is known to contain become inert stand-ins, and any other is refused by name. Tensors are
mapped, so that their bytes are read when and where they are needed: by offset in the file.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from accelz.flat_buffer import HOST
from zero.errors import CheckpointError, CorruptCheckpointError

_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, lengths of the name and of the extra field


@dataclass(frozen=True)
class Record:
    """A record of a zip. offset: of its first byte in the file. crc: its CRC-32, None if none was taken."""

    name: str
    offset: int
    nbytes: int
    crc: int | None


class Inert:
    """In place of an object of another package: it holds what was stored and can do nothing."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


class TorchFile:
    """An open file. content: what was saved, with tensors that are mapped.

    stand_ins: full names of classes, and what to make of them. Raises CheckpointError for a file that is not
    there or is not of this kind, or that holds other classes; CorruptCheckpointError for one that is cut or
    makes no sense.
    """

    def __init__(self, path: Path, stand_ins: Mapping[str, type]) -> None:
        self.path = path
        self.records = records_of(path)
        self.content = _load(path, stand_ins)
        self._data = {r.offset: r for r in self.records if "/data/" in r.name and r.nbytes}
        self._base = self._find_base()

    def locate(self, tensor: Tensor) -> tuple[Record, int]:
        """The record that holds a tensor of `content`, and the tensor's offset in it, in bytes."""
        storage = tensor.untyped_storage()
        record = self._data[storage.data_ptr() - self._base]
        return record, int(tensor.storage_offset()) * tensor.element_size()

    def _find_base(self) -> int:
        """The address that the file is mapped to: storages and records lie alike."""
        found = map(Tensor.untyped_storage, tensors_in(self.content))
        storages = {storage.data_ptr(): storage.nbytes() for storage in found if storage.nbytes()}
        if not storages:
            return 0
        base = min(storages) - min(self._data, default=0)
        for address, nbytes in storages.items():
            record = self._data.get(address - base)
            if record is None or record.nbytes != nbytes:
                raise CorruptCheckpointError(
                    f"{self.path}: its tensors and its records do not belong together"
                )
        return base


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in nested containers."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Inert):
        yield from tensors_in(vars(value))


def records_of(path: Path, start: int = 0, nbytes: int | None = None) -> list[Record]:
    """The records of a zip: a file, or `nbytes` of one from `start` on; raises as TorchFile does."""
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
            f"{path} is cut or is no file of torch.save (those of torch before 1.6 are not read): {error}"
        ) from error


class Window(io.RawIOBase):
    """A part of a file, as a file to read."""

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
                raise CorruptCheckpointError(f"{path}: {entry.filename!r} is compressed; torch does not")
            file.seek(entry.header_offset)
            signature, name, extra = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
            offset = entry.header_offset + _LOCAL_HEADER.size + name + extra
            if signature != b"PK\3\4" or offset + entry.file_size > size:
                raise CorruptCheckpointError(f"{path}: the record {entry.filename!r} reaches beyond its end")
            summed = entry.CRC or not entry.file_size  # zero is what torch writes where it takes none
            yield Record(entry.filename, offset, entry.file_size, entry.CRC if summed else None)


def _load(path: Path, stand_ins: Mapping[str, type]) -> Any:
    known: list[Any] = [(stand_in, name) for name, stand_in in stand_ins.items()]
    try:
        with torch.serialization.safe_globals(known):
            foreign = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
            if foreign:
                raise CheckpointError(
                    f"{path} holds objects that are not read, since that would run their code: "
                    f"{', '.join(sorted(foreign))}"
                )
            return torch.load(path, map_location=HOST, mmap=True, weights_only=True)
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{path} cannot be read without running code: {error}") from error
    except Exception as error:  # whatever a hostile pickle makes torch raise
        what = f"{type(error).__name__}: {error}"
        raise CorruptCheckpointError(f"{path} makes no sense to torch: {what}") from error
