"""The directory of a zip of uncompressed records, read by offset. Each record's bytes lie in the zip once.

Python's zipfile takes a kilobyte and ten microseconds for a record, and knows no limit.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_END = struct.Struct("<4s6xHLL2x")  # signature, records, bytes and place of the directory
_LOCATOR = struct.Struct("<4s4xQ4x")  # signature, place of the large end
_LARGE_END = struct.Struct("<4s28xQQQ")  # as the end
_ENTRY = struct.Struct("<4s4xHH4xLLLHHH8xL")  # signature, flags, method, crc, sizes, lengths, place
_LOCAL = struct.Struct("<4s22xHH")  # signature, lengths of the name and of the extra field
_EXTRA = struct.Struct("<HH")
_LONGEST_COMMENT = (1 << 16) - 1
_ENCRYPTED = 1
_SEE_EXTRA = 0xFFFFFFFF
_MOST_RECORDS = 1 << 18  # as many tensors as a pickle may describe
_MOST_DIRECTORY = 1 << 26  # bytes
Read = Callable[[int, int], bytes]
"""Takes an offset and a number of bytes, and returns them, or fewer at the end."""


@dataclass(frozen=True)
class FileRecord:
    """A record of a zip. offset: of its first byte in the file. crc: its CRC-32, or None if it has none."""

    name: str
    offset: int
    nbytes: int
    crc: int | None


def records(read: Read, size: int) -> list[FileRecord]:
    """The records of a zip of `size` bytes. Raises ValueError for one that makes no sense."""
    begin, nbytes = _directory(read, size)
    found: list[FileRecord] = []
    left = size
    for name, crc, length, header in _entries(read(begin, nbytes)):
        local = read(header, _LOCAL.size)
        if len(local) < _LOCAL.size or local[:4] != b"PK\3\4":
            raise ValueError(f"the record {name!r} extends past its end")
        _, named, extra = _LOCAL.unpack(local)
        offset = header + _LOCAL.size + named + extra
        left -= length
        if offset + length > size or left < 0 or len(found) == _MOST_RECORDS:
            raise ValueError(f"the record {name!r} extends past its end, or there are too many")
        summed = crc or not length  # torch writes zero where it takes none
        found.append(FileRecord(name, offset, length, crc if summed else None))
    return found


def _directory(read: Read, size: int) -> tuple[int, int]:
    """The first byte of the directory, and its length."""
    low = max(0, size - _END.size - _LONGEST_COMMENT)
    tail = read(low, size - low)
    at = tail.rfind(b"PK\5\6", 0, len(tail) - _END.size + 4)
    if at < 0:
        raise ValueError("it does not end as a zip does")
    _, _, nbytes, begin = _END.unpack_from(tail, at)
    locator = read(low + at - _LOCATOR.size, _LOCATOR.size) if low + at >= _LOCATOR.size else b""
    if locator[:4] == b"PK\6\7":
        _, place = _LOCATOR.unpack(locator)
        large = read(place, _LARGE_END.size) if place < size else b""
        if len(large) < _LARGE_END.size or large[:4] != b"PK\6\6":
            raise ValueError("its directory cannot be found")
        _, _, nbytes, begin = _LARGE_END.unpack(large)
    if begin + nbytes > low + at or nbytes > _MOST_DIRECTORY:
        raise ValueError("its directory cannot be where, or as large as, it says")
    return begin, nbytes


def _entries(directory: bytes) -> Iterator[tuple[str, int, int, int]]:
    """The name, CRC-32, length and place of each record."""
    at = 0
    while at < len(directory):
        if len(directory) < at + _ENTRY.size or directory[at : at + 4] != b"PK\1\2":
            raise ValueError("its directory is cut off")
        entry = _ENTRY.unpack_from(directory, at)
        _, flags, method, crc, packed, length, named, extra, comment, place = entry
        at += _ENTRY.size
        name = directory[at : at + named].decode(errors="replace")
        if method or flags & _ENCRYPTED:
            raise ValueError(f"{name!r} is compressed or encrypted, which torch.save never does")
        more = directory[at + named : at + named + extra]
        length, packed, place = _widened([length, packed, place], more)
        if packed != length:
            raise ValueError(f"the sizes of {name!r} contradict each other")
        yield name, crc, length, place
        at += named + extra + comment


def _widened(values: list[int], extra: bytes) -> list[int]:
    """Replace values that stand in the extra field, in their order there, since they need 64 bits."""
    at, wide = 0, iter(())
    while at + _EXTRA.size <= len(extra):
        kind, length = _EXTRA.unpack_from(extra, at)
        at += _EXTRA.size
        if kind == 1:
            field = extra[at : at + length]
            wide = (n for (n,) in struct.iter_unpack("<Q", field[: len(field) // 8 * 8]))
        at += length
    return [next(wide, value) if value == _SEE_EXTRA else value for value in values]
