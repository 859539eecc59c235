"""Publishing a checkpoint under its name in one step, on rank 0.

Beside a checkpoint `name` there may be hidden directories: `.name.zero-new`, being written;
`.name.zero-old`, the previous checkpoint of that name, until the new one has taken its place;
`.name.zero-trash`, being removed. The next save in the same parent directory clears up whatever a killed
save leaves of them. A live save holds a lock on `.name.zero-new`.

Every step is on the disk before the next begins:
1. the ranks' files and the manifest are written to `.name.zero-new`, with their directory entries;
2. what `latest` is to hold is written beside it;
3. `name`, if it exists, becomes `.name.zero-old`;
4. `.name.zero-new` becomes `name`: the checkpoint is published;
5. `latest` is replaced;
6. `.name.zero-old` and the checkpoints that rotate out are removed.

Where directories cannot be renamed, steps 3 and 4 are those of `in_place`. An error up to step 4 leaves
everything as it was. Later ones are warnings, and the next save does what is left.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from zero.errors import CheckpointError, UsageError
from zero.files import in_place
from zero.files.manifest import LATEST, MANIFEST, hidden
from zero.files.pointer import Pointer
from zero.files.storage import Lock, Storage, write_whole

_log = logging.getLogger("zero")


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
    """The publication of one checkpoint. path: its directory. staging: the one that it is written to.

    Methods raise OSError, and CheckpointError if something that they must not replace is in the way.
    """

    def __init__(self, storage: Storage, path: Path, keep_last: int | None) -> None:
        self._storage = storage
        self.path = path
        self._keep_last = keep_last
        self._pointer = Pointer(storage, path.parent)
        self._lock: Lock | None = None
        self._begun = False  # until then the staging directory is somebody else's
        self._left: list[str] = []  # errors in what another save can do as well
        self.staging = hidden(path, "new")

    def begin(self) -> None:
        """Do what earlier saves have left to do, and make the directory to write into."""
        self._make_parents(self.path.parent)
        with self._alone():
            self._clear_up()
            if self._storage.exists(self.staging):
                raise CheckpointError(f"another save of {self.path} is in progress")
            self._check_replaceable()
            self._pointer.check()
            with self._later():
                self._pointer.finish()
            self._warn("before %s is saved, what an earlier save has left to do")
            self._storage.make_directory(self.staging)
            self._begun = True
            self._lock = self._storage.lock(self.staging)

    def commit(self, manifest: bytes) -> None:
        """Complete the staged checkpoint and publish it. Raises nothing once it is published."""
        write_whole(self._storage, self.staging / MANIFEST, manifest)
        self._storage.sync_directory(self.staging)
        with self._alone():
            expired = self._pointer.rotate(self.path.name, self._keep_last)
            self._pointer.prepare(self.path.name, manifest)
            renamed = self._take_name()
            if not renamed:
                manifest, names = in_place.with_free_names(self._storage, self.path, manifest)
                self._pointer.prepare(self.path.name, manifest)
                in_place.publish(self._storage, self.staging, self.path, manifest, names)
            self._settle(expired, renamed)
        self._warn("%s is saved, but what follows a save")

    def abandon(self) -> None:
        """Remove what was staged, and restore the checkpoint that it was to replace."""
        if not self._begun:
            return
        with self._alone():
            with self._later():
                self._pointer.put_back()
            in_place.remove_strays(self._storage, self.path)
            self._remove(self.staging)
            self._restore(self.path)
            with self._later():
                self._pointer.finish()  # what is prepared may be an earlier save's, or another one's

    def close(self) -> None:
        """Release the lock on the staging directory."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other saves from changing names in the parent directory during the block."""
        lock = self._storage.lock(self.path.parent, wait=True)
        try:
            yield
        finally:
            if lock is not None:
                lock.release()

    @contextmanager
    def _later(self) -> Iterator[None]:
        """Leave it to the next save what the block fails to do."""
        try:
            yield
        except Exception as error:
            self._left.append(str(error))

    def _warn(self, what: str) -> None:
        if self._left:
            told = "; ".join(dict.fromkeys(self._left))
            _log.warning(what + " could not be done, and the next save tries again: %s", self.path, told)
            self._left.clear()

    def _take_name(self) -> bool:
        """Rename the staged directory. Returns False, with all as before, where that is not possible."""
        if self._storage.exists(self.path) and not self._rename(self.path, hidden(self.path, "old")):
            return False
        renamed = in_place.rename(self._storage, self.staging, self.path)
        if not renamed:
            self._restore(self.path)
        return renamed

    def _settle(self, expired: list[str], renamed: bool) -> None:
        """Do what follows publication. Nothing is removed before that, and `latest`, are on the disk."""
        with self._later():
            self._storage.sync_directory(self.path)
            self._storage.sync_directory(self.path.parent)
            self._pointer.replace()
        if self._left:
            return
        with self._later():
            if not renamed:
                in_place.remove_strays(self._storage, self.path)
                self._remove(self.staging)
            self._remove(hidden(self.path, "old"))
        for name in expired:
            with self._later():
                self._discard(self.path.with_name(name))

    def _clear_up(self) -> None:
        """Put right what killed saves have left. Of another name than this save's, it may also stay."""
        kinds = tuple(f".zero-{kind}" for kind in ("new", "old", "trash"))
        hidden_names = [n for n in self._storage.names(self.path.parent) if n[0] == "." and n.endswith(kinds)]
        for name in sorted({n[1:].rpartition(".")[0] for n in hidden_names} - {LATEST, self.path.name}):
            with self._later():
                self._put_right(self.path.with_name(name))
        self._put_right(self.path)

    def _put_right(self, path: Path) -> None:
        """Clear up what a killed save of `path` has left; do nothing if that save is still running."""
        storage, (new, old, trash) = self._storage, (hidden(path, kind) for kind in ("new", "old", "trash"))
        if storage.exists(new):
            lock = storage.lock(new)
            if lock is None:
                return
            lock.release()
            in_place.remove_strays(storage, path)
            self._remove(new)
        self._remove(trash)
        self._restore(path)
        if storage.exists(old) and storage.exists(path / MANIFEST):
            storage.sync_directory(path.parent)  # the save may have failed to
            self._remove(old)
        if in_place.is_half_removed(storage, path):
            in_place.discard(storage, path)

    def _restore(self, path: Path) -> None:
        """Give a checkpoint that was to be replaced its name back, if it can be renamed."""
        old = hidden(path, "old")
        if self._storage.exists(old) and not self._storage.exists(path):
            self._rename(old, path)

    def _check_replaceable(self) -> None:
        path, storage = self.path, self._storage
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

    def _discard(self, path: Path) -> None:
        """Remove a checkpoint, so that no half-removed one is ever visible."""
        trash = hidden(path, "trash")
        self._remove(trash)
        if not self._rename(path, trash):
            in_place.discard(self._storage, path)
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

    def _rename(self, old: Path, new: Path) -> bool:
        renamed = in_place.rename(self._storage, old, new)
        if renamed:
            self._storage.sync_directory(new.parent)
        return renamed
