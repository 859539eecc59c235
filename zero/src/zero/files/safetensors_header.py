"""The header of a safetensors file, as zero writes it; and where the tensors are in files of others.

What is read is one file, or a directory in the layout of transformers. Every tensor's place is checked
against its shape and the file's size, so nothing outside it is ever read: the library of safetensors does
that, and what it refuses is refused here, too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from zero.errors import CheckpointError
from zero.files.boundary import typed
from zero.files.manifest import ITEM_BYTES, LONGEST_HEADER, MOST_DIMENSIONS, Sized
from zero.files.storage import DISK, PAGE
from zero.files.strict_json import parse
from zero.files.weight_map import Layout

METADATA = "__metadata__"  # the name that safetensors reserves
LAYOUT = Layout("model.safetensors", "model.safetensors.index.json")


def in_values(dtype: str, shape: Sequence[int]) -> list[int]:
    """A tensor's shape as safetensors counts it: in values, of which F4 has two in an element of torch."""
    return [*shape[:-1], 2 * shape[-1]] if dtype == "F4" and shape else list(shape)


def lay_out(
    metadata: Mapping[str, str], tensors: Iterable[tuple[str, str, Sequence[int], int]]
) -> tuple[bytes, list[int]]:
    """The header of a file that holds `tensors` one after another, and the bytes where they begin.

    tensors: name, dtype, shape and bytes of each. The header includes its length field, and is padded with
    spaces so that the tensors begin on a page. The list of positions has one for each tensor, and one for the
    end of the last.
    """
    described: dict[str, Any] = {METADATA: metadata}
    ends = [0]
    for name, dtype, shape, nbytes in tensors:
        offsets = [ends[-1], ends[-1] + nbytes]
        described[name] = {"dtype": dtype, "shape": in_values(dtype, shape), "data_offsets": offsets}
        ends.append(offsets[1])
    text = json.dumps(described, separators=(",", ":")).encode()
    begin = -(-(8 + len(text)) // PAGE) * PAGE
    return (begin - 8).to_bytes(8, "little") + text.ljust(begin - 8), [begin + end for end in ends]


@dataclass(frozen=True)
class SafeTensor(Sized):
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


def is_safetensors(path: Path) -> bool:
    """Whether a path is a safetensors file, or a directory with such files of a model."""
    if path.is_dir():
        return LAYOUT.is_in(path)
    return path.suffix == ".safetensors" and path.exists()


def describe(path: Path) -> list[SafeTensor]:
    """All tensors at `path`, in the order of their files and of their places there.

    Raises CheckpointError for a file that is missing, cannot be read, or has an unknown dtype, and
    CorruptCheckpointError for files that contradict themselves or each other.
    """
    files, check = LAYOUT.files(path)
    found = [tensor for file in files for tensor in _in_file(file)]
    check((name, tensor.path.name) for tensor in found for name in (tensor.name, *tensor.aliases))
    return found


def _in_file(path: Path) -> list[SafeTensor]:
    """The tensors in the order of their bytes."""
    with typed(path, "is truncated or not a safetensors file"):
        header, begin = _header(path)
        aliases: dict[str, list[str]] = {}
        for alias, name in (header.pop(METADATA, None) or {}).items():
            if alias != "format":
                aliases.setdefault(name, []).append(alias)
        found = [_tensor(path, name, begin, entry, aliases.get(name, ())) for name, entry in header.items()]
        with safe_open(path, "np"):  # checks that all bytes belong to exactly one tensor
            return sorted(found, key=lambda tensor: (tensor.offset, tensor.nbytes))


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """A file's header, and the byte where its data begin."""
    with closing(DISK.open(path)) as file:
        size, length = file.size(), int.from_bytes(file.read_bytes(0, 8), "little")
        if length > min(LONGEST_HEADER, size - 8):
            raise ValueError(f"its header has {length:,} bytes, of {size:,} in all")
        return parse(file.read_bytes(8, length)), 8 + length


def _tensor(
    path: Path, name: str, begin: int, entry: Mapping[str, Any], aliases: Sequence[str]
) -> SafeTensor:
    dtype, shape, (first, last) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if dtype not in ITEM_BYTES:
        raise CheckpointError(f"{path}: {name!r} is {str(dtype)[:80]}; supported are {', '.join(ITEM_BYTES)}")
    if len(shape) > MOST_DIMENSIONS:  # before they are multiplied
        raise ValueError(f"{name!r} has {len(shape):,} dimensions")
    tensor = SafeTensor(path, name, dtype, _in_elements(dtype, shape), begin + first, tuple(aliases))
    if last - first != tensor.nbytes:
        raise ValueError(f"the byte range of {name!r} does not match its shape")
    return tensor


def _in_elements(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A tensor's shape as torch counts it; see `in_values`. Raises ValueError for half an element."""
    if dtype != "F4" or not shape:
        return shape
    if shape[-1] % 2:
        raise ValueError("its rows of F4 do not fill their bytes")
    return (*shape[:-1], shape[-1] // 2)
