"""The index of a model whose weights are in several files, in the layout of transformers."""

from __future__ import annotations

from pathlib import Path

from zero.errors import CheckpointError, CorruptCheckpointError
from zero.files.boundary import typed
from zero.files.storage import DISK, read_whole
from zero.files.strict_json import parse

_LARGEST_INDEX = 1 << 26  # bytes


def read_weight_map(index: Path) -> dict[str, str]:
    """Read which file has each name. All files are beside the index.

    Raises CorruptCheckpointError for an index that makes no sense, and CheckpointError for one that cannot be
    read and for a file that is not beside it.
    """
    with typed(index, "cannot be used"):
        weight_map = parse(read_whole(DISK, index, _LARGEST_INDEX))["weight_map"]
        names = set(weight_map.values())
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{index} names {name!r}, which is not a file next to it")
    for name in sorted(names):
        if not (index.parent / name).is_file():
            raise CheckpointError(f"{index.parent} is incomplete: {name} is missing")
    return dict(weight_map)


def check_weight_map(index: Path, weight_map: dict[str, str], found: list[tuple[str, str]]) -> None:
    """Raise CorruptCheckpointError unless the index is right. found: names of tensors and of their files."""
    places: dict[str, str] = {}
    for name, file in found:
        if name in places:
            raise CorruptCheckpointError(f"{index.parent}: {name!r} is in two files")
        places[name] = file
    for name, file in weight_map.items():
        if places.get(name) != file:
            raise CorruptCheckpointError(f"{index} says that {name!r} is in {file}, but it is not")
