"""Publishing a checkpoint under its name in one step, on rank 0.

Beside a checkpoint `name` there may be hidden directories: `.name.zero-new`, being written;
`.name.zero-old`, the previous checkpoint of that name, until the new one has taken its place;
`.name.zero-trash`, being removed. The next save in the same parent directory clears up whatever a killed
save leaves of them. A live save holds a lock on `.name.zero-new`.

Every step is on the disk before the next begins:
1. the ranks' files and the manifest are written to `.name.zero-new`, with their directory entries;
2. `name`, if it exists, becomes `.name.zero-old`;
3. `.name.zero-new` becomes `name`;
4. `latest` is replaced;
5. `.name.zero-old` and the checkpoints that rotate out are removed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from zero.checkpoint.manifest import LARGEST_LATEST, LATEST, MANIFEST, Latest, hidden, seal
from zero.checkpoint.reader import names_another, read_latest
from zero.checkpoint.storage import Lock, Storage, read_whole, write_whole
from zero.errors import CheckpointError, CorruptCheckpointError, UsageError


def check_name(path: Path) -> None:
    """Raise UsageError for a path that cannot name a checkpoint."""
    if not path.name or path.name.startswith(".") or path.name == LATEST:
        raise UsageError(
            f"{str(path)!r} cannot name a checkpoint: the last part must not be empty, {LATEST!r} or begin "
            "with a dot; use e.g. 'runs/a/step-100'"
        )
    try:
        path.name.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{str(path)!r} cannot name a checkpoint: it cannot be encoded as UTF-8") from None


class Publication:
    """The publication of one checkpoint.

    Methods raise OSError, and CheckpointError if something that they must not replace is in the way.
    """

    def __init__(self, storage: Storage, path: Path, keep_last: int | None) -> None:
        self._storage = storage
        self._path = path
        self._keep_last = keep_last
        self._lock: Lock | None = None
        self._begun = False  # until then the staging directory is somebody else's
        self.staging = hidden(path, "new")

    def begin(self) -> None:
        """Clear up after killed saves and make the directory to write into."""
        self._make_parents(self._path.parent)
        with self._alone():
            for name in sorted({n[1:].rpartition(".")[0] for n in self._leftovers()}):
                self._put_right(self._path.with_name(name))
            if self._storage.exists(self.staging):
                raise CheckpointError(f"another save of {self._path} is in progress")
            self._check_replaceable()
            self._check_latest()
            self._storage.make_directory(self.staging)
            self._begun = True
            self._lock = self._storage.lock(self.staging)

    def commit(self, manifest: bytes) -> None:
        """Complete the staged checkpoint and publish it."""
        write_whole(self._storage, self.staging / MANIFEST, manifest)
        self._storage.sync_directory(self.staging)
        with self._alone():
            old = hidden(self._path, "old")
            if self._storage.exists(self._path):
                self._rename(self._path, old)
            self._rename(self.staging, self._path)
            expired = self._point()
            self._remove(old)
            for name in expired:
                self._discard(self._path.with_name(name))

    def abandon(self) -> None:
        """Remove what was staged, and restore the checkpoint that it was to replace."""
        if not self._begun:
            return
        self._remove(self.staging)
        old = hidden(self._path, "old")
        if self._storage.exists(old) and not self._storage.exists(self._path):
            self._rename(old, self._path)

    def close(self) -> None:
        """Release the lock on the staging directory."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other saves from changing names in the parent directory during the block."""
        lock = self._storage.lock(self._path.parent, wait=True)
        try:
            yield
        finally:
            if lock is not None:
                lock.release()

    def _leftovers(self) -> list[str]:
        kinds = tuple(f".zero-{kind}" for kind in ("new", "old", "trash"))
        return [n for n in self._storage.names(self._path.parent) if n[0] == "." and n.endswith(kinds)]

    def _put_right(self, path: Path) -> None:
        """Clear up what a killed save of `path` has left; do nothing if that save is still running."""
        new, old, trash = (hidden(path, kind) for kind in ("new", "old", "trash"))
        if path.name == LATEST:
            self._storage.remove(new)
            return
        if self._storage.exists(new):
            lock = self._storage.lock(new)
            if lock is None:
                return
            lock.release()
        if self._storage.exists(old) and not self._storage.exists(path):
            self._rename(old, path)
        for leftover in (new, old, trash):
            self._remove(leftover)

    def _check_replaceable(self) -> None:
        path, storage = self._path, self._storage
        if storage.is_link(path):
            raise CheckpointError(
                f"{path} is a symbolic link, which saving would replace; choose another name"
            )
        if not storage.exists(path) or storage.exists(path / MANIFEST):
            return
        if not storage.is_directory(path) or storage.names(path):
            raise CheckpointError(
                f"{path} exists and is not a checkpoint, so it was left untouched: choose another name"
            )

    def _check_latest(self) -> None:
        """Raise CheckpointError for a `latest` of another program: DeepSpeed's, or a link of that name."""
        path, storage = self._path.parent / LATEST, self._storage
        foreign = storage.is_link(path) or storage.is_directory(path)
        if not foreign and storage.exists(path):
            foreign = names_another(path.parent, read_whole(storage, path, LARGEST_LATEST), storage)
        if foreign:
            raise CheckpointError(f"{path} belongs to another program; save to a different directory")

    def _point(self) -> list[str]:
        """Make `latest` name the new checkpoint; returns the names that rotate out."""
        parent, name = self._path.parent, self._path.name
        rotation = [n for n in self._rotation() if n != name and self._storage.exists(parent / n)]
        if self._keep_last is not None:
            rotation.append(name)
        fresh = hidden(parent / LATEST, "new")
        latest = Latest(checkpoint=name, rotation=tuple(rotation))
        self._storage.remove(fresh)
        write_whole(self._storage, fresh, seal("zero-latest", latest))
        self._rename(fresh, parent / LATEST)
        return [] if self._keep_last is None else rotation[: -self._keep_last]

    def _rotation(self) -> tuple[str, ...]:
        """The names that `latest` lists for rotation. If it is damaged they are lost, and never removed."""
        if not self._storage.exists(self._path.parent / LATEST):
            return ()
        try:
            return read_latest(self._path.parent, self._storage).rotation
        except CorruptCheckpointError:
            return ()

    def _discard(self, path: Path) -> None:
        trash = hidden(path, "trash")
        self._remove(trash)
        self._rename(path, trash)  # so no half-removed checkpoint is ever visible
        self._remove(trash)

    def _remove(self, path: Path) -> None:
        """Remove a directory, manifest first: half removed it is no checkpoint. Of a link, only the link."""
        if not self._storage.is_link(path):
            self._storage.remove(path / MANIFEST)
        self._storage.remove(path)

    def _make_parents(self, path: Path) -> None:
        """Make `path` and its parents, and sync all: a failed save may have made some without syncing."""
        if path == path.parent:
            return
        self._make_parents(path.parent)
        if not self._storage.exists(path):
            self._storage.make_directory(path)
            self._storage.sync_directory(path.parent)
        elif not self._storage.is_directory(path):
            raise CheckpointError(f"{path} exists but is not a directory")
        else:
            with suppress(OSError):  # not ours: it may not even be readable
                self._storage.sync_directory(path.parent)

    def _rename(self, old: Path, new: Path) -> None:
        self._storage.rename(old, new)
        self._storage.sync_directory(new.parent)
