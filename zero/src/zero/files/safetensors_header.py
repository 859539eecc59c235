"""Where the tensors are in safetensors files: one file, or a directory in the layout of transformers.

Every tensor's place is checked against its shape and the file's size, so nothing outside it is ever read.
What the library of safetensors refuses is refused here, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero.errors import CheckpointError, CorruptCheckpointError
from zero.files.header import METADATA
from zero.files.manifest import ITEM_BYTES, LONGEST_HEADER, MOST_DIMENSIONS
from zero.files.storage import DISK
from zero.files.strict_json import parse
from zero.files.weight_map import check_weight_map, read_weight_map

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class SafeTensor:
    """A tensor in a file.

    offset: of its first byte in the file. aliases: further names of the same tensor, which
    `safetensors.torch.save_model` writes to the metadata.
    """

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    aliases: tuple[str, ...] = ()
    stride: None = None  # always row-major

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        return self.numel * self.item_bytes


def is_safetensors(path: Path) -> bool:
    """Whether a path is a safetensors file, or a directory with such files of a model."""
    if path.is_dir():
        return (path / INDEX).exists() or (path / WHOLE).exists()
    return path.suffix == ".safetensors" and path.exists()


def describe(path: Path) -> list[SafeTensor]:
    """All tensors at `path`, in the order of their files and of their places there.

    Raises CheckpointError for a file that is missing, cannot be read, or has an unknown dtype, and
    CorruptCheckpointError for files that contradict themselves or each other.
    """
    if not path.is_dir() or not (path / INDEX).exists():
        return _in_file(path / WHOLE if path.is_dir() else path)
    weight_map = read_weight_map(path / INDEX)
    found = [tensor for name in sorted(set(weight_map.values())) for tensor in _in_file(path / name)]
    names = [(name, tensor.path.name) for tensor in found for name in (tensor.name, *tensor.aliases)]
    check_weight_map(path / INDEX, weight_map, names)
    return found


def _in_file(path: Path) -> list[SafeTensor]:
    header, begin, size = _header(path)
    metadata = header.pop(METADATA, None) or {}
    aliases: dict[str, list[str]] = {}
    for alias, name in metadata.items():
        if alias != "format":
            aliases.setdefault(name, []).append(alias)
    return list(_placed(path, header, aliases, begin, size))


def _header(path: Path) -> tuple[dict[str, Any], int, int]:
    """A file's header, the byte where its data begin, and its size."""
    try:
        with closing(DISK.open(path)) as file:
            size, begin = file.size(), bytearray(8)
            count = file.read(0, memoryview(begin))
            length = int.from_bytes(begin, "little")
            if count < 8 or length > min(LONGEST_HEADER, size - 8):
                raise ValueError(f"its header has {length:,} bytes, of {size:,} in all")
            text = bytearray(length)
            file.read(8, memoryview(text))
        header = parse(bytes(text))
        _check_metadata(header)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except ValueError as error:
        raise CorruptCheckpointError(f"{path} is truncated or not a safetensors file: {error}") from error
    return header, 8 + length, size


def _check_metadata(header: Any) -> None:
    if not isinstance(header, dict):
        raise ValueError("its header is not an object")
    metadata = header.get(METADATA)
    if metadata is None:
        return
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"its {METADATA} holds more than strings")


def _placed(
    path: Path, header: Mapping[str, Any], aliases: Mapping[str, list[str]], begin: int, size: int
) -> Iterator[SafeTensor]:
    """The tensors in the order of their bytes. Raises if these overlap or leave gaps."""
    end = 0
    try:
        places = {name: _naturals(entry["data_offsets"], 2) for name, entry in header.items()}
        for name in sorted(places, key=lambda name: places[name]):
            dtype, shape = header[name]["dtype"], _naturals(header[name]["shape"], MOST_DIMENSIONS)
            if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
                known = ", ".join(ITEM_BYTES)
                raise CheckpointError(f"{path}: {name!r} is {_shown(dtype)}; supported are {known}")
            first, last = places[name]
            shape = _in_elements(dtype, shape)
            tensor = SafeTensor(path, name, dtype, shape, begin + first, tuple(aliases.get(name, ())))
            if first != end or last - first != tensor.nbytes or math.prod(filter(None, shape)) >= 1 << 62:
                raise ValueError(f"the byte range of {name!r} does not match its shape")
            yield tensor
            end = last
        if begin + end != size:
            raise ValueError(f"it has {size} bytes, but its tensors end at {begin + end}")
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptCheckpointError(f"{path} is truncated or not a safetensors file: {error}") from error


def _naturals(values: Any, most: int) -> tuple[int, ...]:
    """A list of sizes or offsets. most: how many there may be."""
    natural = isinstance(values, list) and all(type(n) is int and 0 <= n < 1 << 62 for n in values)
    if not natural or len(values) > most:
        raise ValueError(f"{_shown(values)} are not sizes of a tensor, or its place")
    return tuple(values)


def _shown(value: Any) -> str:
    text = repr(value) if not isinstance(value, str) else value
    return text if len(text) < 80 else f"{text[:80]}…"


def _in_elements(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A tensor's shape as torch counts it; see `in_values`. Raises ValueError for half an element."""
    if dtype != "F4" or not shape:
        return shape
    if shape[-1] % 2:
        raise ValueError("its rows of F4 do not fill their bytes")
    return (*shape[:-1], shape[-1] // 2)
