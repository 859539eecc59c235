"""`latest`, beside the checkpoints: which of them is the newest, and which were saved for rotation.

Its next contents are on the disk, as `.latest.zero-new`, before the checkpoint that they name is published.
If they cannot take their place after that, or a kill comes before it, the next save puts them there, or its
own, which list the same checkpoints. If that save then fails itself, it puts back what was there before. Only
if it is killed in its last moments, too, is one left out of the rotation.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from zlib import crc32

from zero.errors import CheckpointError, CorruptCheckpointError
from zero.files.in_place import is_half_removed
from zero.files.manifest import (
    LARGEST_LATEST,
    LARGEST_MANIFEST,
    LATEST,
    MANIFEST,
    Latest,
    hidden,
    seal,
    unseal,
)
from zero.files.reader import names_another, read_latest
from zero.files.storage import Storage, read_whole, write_whole


class Pointer:
    """The `latest` of one directory. Methods raise OSError, and CheckpointError as they say."""

    def __init__(self, storage: Storage, parent: Path) -> None:
        self._storage = storage
        self._parent = parent
        self._path = parent / LATEST
        self._next = hidden(self._path, "new")
        self._listed: tuple[str, ...] = ()
        self._earlier = b""  # what an earlier save has prepared, and prepare() has removed

    def check(self) -> None:
        """Raise CheckpointError for a `latest` of another program: DeepSpeed's, or a link of that name."""
        path, storage = self._path, self._storage
        foreign = storage.is_link(path) or storage.is_directory(path)
        if not foreign and storage.exists(path):
            foreign = names_another(self._parent, read_whole(storage, path, LARGEST_LATEST), storage)
        if foreign:
            raise CheckpointError(f"{path} belongs to another program; save to a different directory")

    def finish(self) -> None:
        """Let what an earlier save has prepared take its place, or drop it if nothing was published."""
        if self._prepared() is None:
            self._storage.remove(self._next)
        else:
            self.replace()

    def rotate(self, name: str, keep_last: int | None) -> list[str]:
        """The names that rotate out when a checkpoint `name` is published, which prepare() is then to say.

        keep_last: how many of those saved for rotation stay, this one included; None: it is saved apart from
        them, and all stay.
        """
        listed = [n for n in self._rotation() if n != name]
        gone = [n for n in listed if is_half_removed(self._storage, self._parent / n)]
        there = [n for n in listed if self._storage.exists(self._parent / n / MANIFEST)]
        there += [] if keep_last is None else [name]
        self._listed = (*gone, *there)
        return gone if keep_last is None else [*gone, *there[:-keep_last]]

    def prepare(self, name: str, manifest: bytes) -> None:
        """Write the next contents. manifest: of the checkpoint that is about to be published.

        Raises CheckpointError if they list so many checkpoints that nobody would read them.
        """
        latest = seal("zero-latest", Latest(checkpoint=name, rotation=self._listed, manifest=crc32(manifest)))
        if len(latest) > LARGEST_LATEST:
            raise CheckpointError(
                f"{self._path} would have {len(latest):,} bytes, and at most {LARGEST_LATEST:,} are read: it "
                f"lists {len(self._listed)} checkpoints for rotation; lower keep_last, or save elsewhere"
            )
        if self._prepared() is not None:
            self._earlier = read_whole(self._storage, self._next, LARGEST_LATEST)
        self._storage.remove(self._next)
        write_whole(self._storage, self._next, latest)

    def put_back(self) -> None:
        """Take back prepare(), as nothing was published: what an earlier save has prepared is there again."""
        if self._earlier:
            self._storage.remove(self._next)
            write_whole(self._storage, self._next, self._earlier)

    def replace(self) -> None:
        """Let what was prepared take its place."""
        self._storage.rename(self._next, self._path)
        self._storage.sync_directory(self._parent)

    def _rotation(self) -> tuple[str, ...]:
        """The names listed for rotation. If `latest` is damaged they are lost, and never removed."""
        prepared = self._prepared()
        if prepared is not None:
            return prepared.rotation
        if not self._storage.exists(self._path):
            return ()
        try:
            return read_latest(self._parent, self._storage).rotation
        except CorruptCheckpointError:
            return ()

    def _prepared(self) -> Latest | None:
        """What an earlier save has prepared, if it names a checkpoint that is there now."""
        with suppress(OSError, ValueError):
            prepared = read_whole(self._storage, self._next, LARGEST_LATEST)
            latest = Latest.model_validate_json(unseal("zero-latest", prepared))
            named = self._parent / latest.checkpoint / MANIFEST
            if crc32(read_whole(self._storage, named, LARGEST_MANIFEST)) == latest.manifest:
                return latest
        return None
