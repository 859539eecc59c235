"""Publishing an output directory under its name in one step, and resuming a killed run.

The files are written to `.NAME.zero-weights` beside it. Its file `plan` identifies what the run was to write:
a later run with the same plan keeps the files that are finished, any other starts over.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

from zero.config.paths import as_path
from zero.consolidate.files import WeightStorage
from zero.errors import CheckpointError, UsageError
from zero.files.manifest import LATEST, MANIFEST, hidden
from zero.files.storage import Lock, read_whole, write_whole

_log = logging.getLogger("zero")
PLAN = "plan"
_LARGEST_PLAN = 1 << 10  # bytes; it is a digest
_OURS = re.compile(
    r"model(-\d{5}-of-\d{5})?\.safetensors|pytorch_model(-\d{5}-of-\d{5})?\.bin"
    r"|model\.safetensors\.index\.json|pytorch_model\.bin\.index\.json|\.zero-lock"
)


class Staging:
    """The directory that is to become `out`.

    Raises UsageError if `out` has no name, CheckpointError if something is in the way, and OSError.
    """

    def __init__(self, storage: WeightStorage, out: Path, overwrite: bool) -> None:
        self._storage = storage
        self.out = Path(os.path.abspath(as_path(out)))  # keeps symbolic links
        if not self.out.name or "\0" in self.out.name:
            raise UsageError(f"{str(out)!r} cannot be written to: name a directory, e.g. 'weights'")
        self.path = hidden(self.out, "weights")
        self._lock: Lock | None = None
        self._check_parent()
        self._check_free(overwrite)

    def begin(self, plan: bytes) -> None:
        """Make the directory, or continue with that of a killed run that had the same plan."""
        storage = self._storage
        old = hidden(self.out, "replaced")
        if storage.exists(old) and not storage.exists(self.out):
            storage.rename(old, self.out)  # a run was killed between two renames
        storage.remove(old)
        if storage.exists(self.path):
            self._claim()
            if self._planned() == plan:
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
        storage.remove(self.path / PLAN)
        for name in storage.names(self.out) if storage.exists(self.out) else ():
            if not _OURS.fullmatch(name):
                storage.keep(self.out / name, self.path / name)
        storage.sync_directory(self.path)
        if not storage.exists(self.out) or not storage.names(self.out):
            storage.rename(self.path, self.out)
        elif storage.exchange(self.path, self.out):
            storage.sync_directory(self.out.parent)
            self._discard(self.path)
        else:
            old = hidden(self.out, "replaced")
            storage.rename(self.out, old)
            try:
                storage.rename(self.path, self.out)
            except OSError:
                storage.rename(old, self.out)
                raise
            self._discard(old)
        storage.sync_directory(self.out.parent)

    def abandon(self) -> None:
        """Remove what was written, so that no later run can resume it."""
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

    def _planned(self) -> bytes:
        try:
            return read_whole(self._storage, self.path / PLAN, _LARGEST_PLAN)
        except OSError:
            return b""

    def _check_parent(self) -> None:
        if not self._storage.is_directory(self.out.parent):
            raise CheckpointError(f"{self.out} cannot be written: there is no directory {self.out.parent}")

    def _check_free(self, overwrite: bool) -> None:
        storage, out = self._storage, self.out
        if not storage.exists(out):
            return
        if not storage.is_directory(out):
            raise CheckpointError(f"{out} exists and is not a directory; choose another name")
        names = storage.names(out)
        if names and not overwrite:
            raise CheckpointError(
                f"{out} exists and holds {names[0]!r}; choose another name, or pass overwrite "
                "(--overwrite) to replace it"
            )
        others = [n for n in names if storage.is_directory(out / n) or n in (MANIFEST, LATEST)]
        if others:
            raise CheckpointError(
                f"{out} is not a model directory: it holds {others[0]!r}; choose another name"
            )
