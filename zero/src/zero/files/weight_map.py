"""The index of a model whose weights are in several files, in the layout of transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from zero.errors import CheckpointError, CorruptCheckpointError
from zero.files.boundary import typed
from zero.files.storage import DISK, read_whole
from zero.files.strict_json import parse

_LARGEST_INDEX = 1 << 26  # bytes


@dataclass(frozen=True)
class Layout:
    """How a model's directory names its files. whole: the only one. index: what tells which has each name."""

    whole: str
    index: str

    def is_in(self, path: Path) -> bool:
        """Whether a directory has such files."""
        return (path / self.index).exists() or (path / self.whole).exists()

    def files(self, path: Path) -> tuple[list[Path], Callable[[Iterable[tuple[str, str]]], None]]:
        """The files at `path`, which may be one itself, and a check of what they hold.

        The check takes the names of all tensors, each with that of its file. Raises CorruptCheckpointError
        for an index that makes no sense or is not right, and CheckpointError for one that cannot be read and
        for a file that is not beside it.
        """
        index = path / self.index
        if not path.is_dir() or not index.exists():
            return [path / self.whole if path.is_dir() else path], lambda _: None
        weight_map = _read(index)
        return [path / name for name in sorted(set(weight_map.values()))], partial(_check, index, weight_map)


def _read(index: Path) -> dict[str, str]:
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


def _check(index: Path, weight_map: dict[str, str], found: Iterable[tuple[str, str]]) -> None:
    places: dict[str, str] = {}
    for name, file in found:
        if name in places:
            raise CorruptCheckpointError(f"{index.parent}: {name!r} is in two files")
        places[name] = file
    for name, file in weight_map.items():
        if places.get(name) != file:
            raise CorruptCheckpointError(f"{index} says that {name!r} is in {file}, but it is not")
