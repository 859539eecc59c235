"""Where the tensors are in safetensors files: one file, or a directory in the layout of transformers.

Every tensor's place is checked against its shape and the file's size, so nothing outside it is ever read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero.checkpoint.manifest import ITEM_BYTES
from zero.errors import CheckpointError, CorruptCheckpointError
from zero.sources.weight_map import check_weight_map, read_weight_map

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_LONGEST_HEADER = 100_000_000  # bytes, the limit of safetensors


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
    header, begin = _header(path)
    metadata = header.pop("__metadata__", {})
    aliases: dict[Any, list[str]] = {}
    for alias, name in metadata.items():
        if isinstance(name, str) and alias != "format":
            aliases.setdefault(name, []).append(alias)
    return list(_placed(path, header, aliases, begin))


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """A file's header, and the byte where its data begin."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            text = file.read(length) if length <= _LONGEST_HEADER else b""
        header = json.loads(text)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{path} is truncated or not a safetensors file: {error}") from error
    metadata = header.get("__metadata__", {}) if isinstance(header, dict) else None
    if not isinstance(metadata, dict):
        raise CorruptCheckpointError(f"{path} is not a safetensors file: its header is not an object")
    return header, 8 + length


def _placed(
    path: Path, header: Mapping[str, Any], aliases: Mapping[Any, list[str]], begin: int
) -> Iterator[SafeTensor]:
    """The tensors in the order of their bytes. Raises if these overlap or leave gaps."""
    size, end = path.stat().st_size, 0
    try:
        for name, entry in sorted(header.items(), key=lambda item: tuple(item[1]["data_offsets"])):
            if entry["dtype"] not in ITEM_BYTES:
                known = ", ".join(ITEM_BYTES)
                raise CheckpointError(f"{path}: {name!r} is {entry['dtype']}; supported are {known}")
            first, last = entry["data_offsets"]
            shape = tuple(int(n) for n in entry["shape"])
            further = tuple(aliases.get(name, ()))
            tensor = SafeTensor(path, name, entry["dtype"], shape, begin + first, further)
            if first != end or last - first != tensor.nbytes or min(shape, default=0) < 0:
                raise ValueError(f"the byte range of {name!r} does not match its shape")
            yield tensor
            end = last
        if begin + end != size:
            raise ValueError(f"it has {size} bytes, but its tensors end at {begin + end}")
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptCheckpointError(f"{path} is truncated or not a safetensors file: {error}") from error
