"""Publishing an output directory under its name in one step, and resuming a killed run.

The files are written to `.NAME.zero-weights` beside it. Its file `plan` identifies what the run was to write:
a later run with the same plan keeps the files that are finished, any other starts over.

Where directories cannot be renamed (see `files.in_place`), the files move one by one, those last by which
weights are found. Meanwhile `.NAME.zero-weights` has a file `moving`, with which a later run of the same plan
goes on.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

from zero.config.paths import as_path
from zero.errors import CheckpointError, UsageError
from zero.files import in_place
from zero.files.manifest import LATEST, MANIFEST, hidden
from zero.files.storage import Lock, Storage, read_whole, write_whole
from zero.sources.deepspeed_files import LATEST_UNIVERSAL

_log = logging.getLogger("zero")
PLAN = "plan"
MOVING = "moving"
_LARGEST_PLAN = 1 << 10  # bytes; it is a digest
_OURS = re.compile(
    r"model(-\d{5}-of-\d{5})?\.safetensors|pytorch_model(-\d{5}-of-\d{5})?\.bin"
    r"|model\.safetensors\.index\.json|pytorch_model\.bin\.index\.json|\.zero-lock"
)
_LOCK = ".zero-lock"
_ENTRIES = (".index.json", MANIFEST, LATEST_UNIVERSAL)


class Staging:
    """The directory that is to become `out`.

    among_others: `out` may hold anything besides, which stays; if that is directories, files move one by one.
    Raises UsageError if `out` has no name, CheckpointError if something is in the way, and OSError.
    """

    def __init__(self, storage: Storage, out: Path, overwrite: bool, among_others: bool = False) -> None:
        self._storage = storage
        self.out = Path(os.path.abspath(as_path(out)))  # keeps symbolic links
        if not self.out.name or "\0" in self.out.name:
            raise UsageError(f"{str(out)!r} cannot be written to: name a directory, e.g. 'weights'")
        self.path = hidden(self.out, "weights")
        self._overwrite = overwrite
        self._among_others = among_others
        self._plan = b""
        self._moving = False
        self._lock: Lock | None = None
        if not storage.is_directory(self.out.parent):
            raise CheckpointError(f"{self.out} cannot be written: there is no directory {self.out.parent}")

    def begin(self, plan: bytes) -> None:
        """Make the directory, or continue with that of a killed run that had the same plan."""
        storage = self._storage
        self._plan, self._moving = plan, self._noted(MOVING) == plan
        old = hidden(self.out, "replaced")
        if storage.exists(old) and not storage.exists(self.out):
            storage.rename(old, self.out)  # a run was killed between two renames
        if not self._moving:
            self._check_free()
        storage.remove(old)
        if storage.exists(self.path):
            self._claim()
            if self._moving or self._noted(PLAN) == plan:
                return
            self.abandon()
        storage.make_directory(self.path)
        self._claim()
        try:
            write_whole(storage, self.path / PLAN, plan)
        except OSError:
            self.abandon()
            raise

    def commit(self) -> None:
        """Give the directory its name. Of one that it replaces, weights are removed and other files kept."""
        storage = self._storage
        if not self._moving:
            storage.remove(self.path / PLAN)
            if self._holds_directories() or not self._take_name():
                write_whole(storage, self.path / MOVING, self._plan)
                storage.sync_directory(self.path)
                self._moving = True
        if self._moving:
            self._move_in()
        storage.sync_directory(self.out.parent)

    def _holds_directories(self) -> bool:
        storage = self._storage
        names = storage.names(self.out) if storage.exists(self.out) else ()
        return any(storage.is_directory(self.out / name) for name in names)

    def _keep_others(self) -> None:
        storage = self._storage
        new = storage.names(self.path)
        for name in storage.names(self.out) if storage.exists(self.out) else ():
            if not _OURS.fullmatch(name) and name not in new:
                storage.link(self.out / name, self.path / name)
        storage.sync_directory(self.path)

    def _take_name(self) -> bool:
        """Returns False, with all as before, where directories cannot be renamed."""
        storage, old = self._storage, hidden(self.out, "replaced")
        self._keep_others()
        if not storage.exists(self.out) or not storage.names(self.out):
            return in_place.rename(storage, self.path, self.out)
        if storage.exchange(self.path, self.out):
            storage.sync_directory(self.out.parent)
            self._discard(self.path)
            return True
        if not in_place.rename(storage, self.out, old):
            return False
        renamed = False
        try:
            renamed = in_place.rename(storage, self.path, self.out)
        finally:
            if not renamed:
                storage.rename(old, self.out)
        if renamed:
            self._discard(old)
        return renamed

    def _move_in(self) -> None:
        """Move everything into OUT, which has no weights meanwhile."""
        storage, out = self._storage, self.out
        try:
            if not storage.exists(out):
                storage.make_directory(out)
            for name in sorted(filter(_OURS.fullmatch, storage.names(out)), key=_is_entry, reverse=True):
                storage.remove(out / name)
            storage.sync_directory(out)
            names = [name for name in storage.names(self.path) if name not in (PLAN, MOVING, _LOCK)]
            for name in sorted(names, key=_is_entry):
                if _is_entry(name):
                    storage.sync_directory(out)
                in_place.move(storage, self.path / name, out / name)
            storage.sync_directory(out)
        except OSError as error:
            raise CheckpointError(
                f"{out} is written in part: {error}. Its files are moved one by one, as this file system "
                "cannot rename its directory; the same call goes on"
            ) from error
        self._discard(self.path)

    def abandon(self) -> None:
        """Remove what was written, so that no later run can resume it; but not what OUT has lost already."""
        if not self._moving:
            self._storage.remove(self.path)
        self.release()

    def release(self) -> None:
        """Release the lock on the directory."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _discard(self, replaced: Path) -> None:
        """Remove what was replaced. What replaces it is there already, so an error is a warning."""
        try:
            self._storage.remove(replaced)
        except OSError as error:
            _log.warning("%s is written, but what it replaces could not be removed: %s", self.out, error)

    def _claim(self) -> None:
        self._lock = self._storage.lock(self.path)
        if self._lock is None:
            raise CheckpointError(
                f"another process is writing {self.out}; wait for it, or choose another name"
            )

    def _noted(self, name: str) -> bytes:
        """The plan of an earlier run, in a file of this name; nothing if there is none."""
        try:
            return read_whole(self._storage, self.path / name, _LARGEST_PLAN)
        except OSError:
            return b""

    def _check_free(self) -> None:
        storage, out = self._storage, self.out
        if not storage.exists(out):
            return
        if not storage.is_directory(out):
            raise CheckpointError(f"{out} exists and is not a directory; choose another name")
        names = storage.names(out)
        if names and not self._overwrite:
            raise CheckpointError(
                f"{out} exists and holds {names[0]!r}; choose another name, or pass overwrite "
                "(--overwrite) to replace it"
            )
        others = [n for n in names if storage.is_directory(out / n) or n in (MANIFEST, LATEST)]
        if others and not self._among_others:
            raise CheckpointError(
                f"{out} is not a model directory: it holds {others[0]!r}; choose another name"
            )


def _is_entry(name: str) -> bool:
    """Whether a file says where the weights are that are in others."""
    return name.endswith(_ENTRIES)
