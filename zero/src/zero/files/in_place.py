"""Publishing and removing checkpoints where directories cannot be renamed: by a name of the manifest file.

An overlay file system refuses to rename a directory that comes from a lower layer, as in a container's image;
some file systems over a network refuse to rename any. Files can be renamed on all of them.

A checkpoint is published into a directory, which may hold one of that name: its files move in under names
that are free there, then its manifest replaces the other, in one step. Files that no manifest names are
*strays*. A directory that is removed loses its manifest's name first, to a *mark*.
"""

from __future__ import annotations

import errno
import json
import re
from itertools import chain, count
from pathlib import Path

from zero.files.manifest import LARGEST_MANIFEST, MANIFEST, hidden, seal, unseal
from zero.files.storage import Storage, read_whole, write_whole

CANNOT_RENAME = frozenset({errno.EXDEV, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})
"""What a file system answers that cannot rename this directory."""

_ENDING = ".safetensors"
_RANK_FILE = re.compile(r"rank-\d{5,}(-\d+)?\.safetensors")


def rename(storage: Storage, old: Path, new: Path) -> bool:
    """Rename a directory. Returns False where the file system cannot."""
    try:
        storage.rename(old, new)
    except OSError as error:
        if error.errno not in CANNOT_RENAME:
            raise
        return False
    return True


def with_free_names(storage: Storage, path: Path, manifest: bytes) -> tuple[bytes, dict[str, str]]:
    """A manifest with names for its files that `path` does not have yet, and these names by the old ones."""
    taken = storage.names(path) if storage.exists(path) else []
    members = json.loads(unseal("zero-checkpoint", manifest))
    every = [entry["name"] for entry in members["files"]]
    tries = ({name: f"{name.removesuffix(_ENDING)}-{n}{_ENDING}" for name in every} for n in count(2))
    names = next(each for each in chain([{n: n for n in every}], tries) if not {*each.values()} & {*taken})
    for entry in members["files"]:
        entry["name"] = names[entry["name"]]
    return seal("zero-checkpoint", members), names


def publish(storage: Storage, staging: Path, path: Path, manifest: bytes, names: dict[str, str]) -> None:
    """Move staged files into `path` and let the manifest take its name there. The last step is not synced.

    names: in `path`, by those in `staging`. Should this raise, `path` has strays and is otherwise unchanged.
    """
    storage.sync_directory(path.parent)  # with the staging directory's name, which tells of strays
    if not storage.exists(path):
        storage.make_directory(path)
    for staged, name in names.items():
        storage.rename(staging / staged, path / name)
    fresh = hidden(path / MANIFEST, "new")
    storage.remove(fresh)
    write_whole(storage, fresh, manifest)
    storage.sync_directory(path)
    storage.rename(fresh, path / MANIFEST)


def remove_strays(storage: Storage, path: Path) -> None:
    """Remove what no manifest names, after a publication that has ended or failed, and an empty directory."""
    if not storage.is_directory(path) or storage.is_link(path):
        return
    named = _files_named(storage, path)
    fresh = hidden(path / MANIFEST, "new").name
    strays = [n for n in storage.names(path) if n == fresh or (_RANK_FILE.fullmatch(n) and n not in named)]
    for name in strays:
        storage.remove(path / name)
    if strays:
        storage.sync_directory(path)
    if not storage.names(path):
        storage.remove(path)


def discard(storage: Storage, path: Path) -> None:
    """Remove a checkpoint that stays where it is: from the first step on it is none, and marked."""
    mark = _mark(path)
    if storage.exists(path / MANIFEST):
        storage.rename(path / MANIFEST, mark)
        storage.sync_directory(path)
    for name in storage.names(path):
        if name != mark.name:
            storage.remove(path / name)
    storage.sync_directory(path)
    storage.remove(path)


def is_half_removed(storage: Storage, path: Path) -> bool:
    """Whether discard() has begun to remove a checkpoint and has not come to an end."""
    if not storage.is_directory(path) or storage.is_link(path):
        return False
    names = storage.names(path)
    return MANIFEST not in names and (not names or _mark(path).name in names)


def _mark(path: Path) -> Path:
    return hidden(path / MANIFEST, "trash")


def _files_named(storage: Storage, path: Path) -> set[str]:
    """The names in a directory's manifest; all names, if that cannot be read: then nothing is a stray."""
    if not storage.exists(path / MANIFEST):
        return set()
    try:
        members = json.loads(
            unseal("zero-checkpoint", read_whole(storage, path / MANIFEST, LARGEST_MANIFEST))
        )
        return {entry["name"] for entry in members["files"]}
    except ValueError:
        return set(storage.names(path))
