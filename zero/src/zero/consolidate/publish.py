"""Publishing an output directory under its name in one step, and resuming a killed run.

The files are written to `.NAME.zero-weights` beside it. Its file `plan` identifies what the run was to write:
a later run with the same plan keeps the files that are finished, any other starts over.

An output *among others* is written into a directory that may hold anything besides and stays the same one, as
processes may stand or write in it. There, and where directories cannot be renamed, the files move one by one,
those last by which weights are found; what they replace waits in `.NAME.zero-replaced`, from where an error
brings it back.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from zero.config.paths import as_path
from zero.errors import CheckpointError, UsageError
from zero.files import in_place
from zero.files.manifest import LATEST, MANIFEST, hidden
from zero.files.storage import LOCK, Lock, Storage, read_whole, write_whole
from zero.sources.deepspeed_files import LATEST_UNIVERSAL

_log = logging.getLogger("zero")
PLAN = "plan"
_LARGEST_PLAN = 1 << 10  # bytes; it is a digest
_MODEL = re.compile(
    r"model(-\d{5}-of-\d{5})?\.safetensors|pytorch_model(-\d{5}-of-\d{5})?\.bin"
    r"|model\.safetensors\.index\.json|pytorch_model\.bin\.index\.json"
)
_ADAPTER = re.compile(r"adapter_model\.(safetensors|bin)")
_ENTRIES = (".index.json", MANIFEST, LATEST_UNIVERSAL)


class Staging:
    """The directory that is to become `out`.

    among_others: `out` may hold anything besides, which stays, as do a model's weights where an adapter is
    written and an adapter where a model is; directories above it are made. Raises UsageError if `out` has no
    name, CheckpointError if something is in the way, and OSError.
    """

    def __init__(self, storage: Storage, out: Path, overwrite: bool, among_others: bool = False) -> None:
        self._storage = storage
        self.out = Path(os.path.abspath(as_path(out)))  # keeps symbolic links
        if not self.out.name or "\0" in self.out.name:
            raise UsageError(f"{str(out)!r} cannot be written to: name a directory, e.g. 'weights'")
        self.path = hidden(self.out, "weights")
        self._overwrite = overwrite
        self._among_others = among_others
        self._lock: Lock | None = None
        self._made: list[Path] = []
        if not among_others and not storage.is_directory(self.out.parent):
            raise CheckpointError(f"{self.out} cannot be written: there is no directory {self.out.parent}")

    def begin(self, plan: bytes) -> None:
        """Make the directory, or continue with that of a killed run that had the same plan."""
        storage = self._storage
        self._made = storage.make_directories(self.out.parent)
        old = hidden(self.out, "replaced")
        if storage.exists(old) and not storage.exists(self.out):
            storage.rename(old, self.out)  # a run was killed between two renames
        self._check_free()
        if storage.exists(self.path):
            self._claim()
            if self._noted_plan() == plan:
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
        storage.remove(hidden(self.out, "replaced"))
        storage.remove(self.path / PLAN)
        if self._stays() or not self._take_name():
            self._exchange_files()
        storage.sync_directory(self.out.parent)

    def _stays(self) -> bool:
        """Whether OUT has to remain the same directory: it has other files, or this process works there."""
        storage, out = self._storage, self.out
        if not self._among_others or not storage.exists(out):
            return False
        new = storage.names(self.path)
        return os.path.samefile(out, os.curdir) or any(
            storage.is_directory(out / name) or not self._replaces(name, new) for name in storage.names(out)
        )

    def _replaces(self, name: str, new: Collection[str]) -> bool:
        """Whether new files replace one of this name beside them, as that file or as that kind of weights."""
        kinds = [_MODEL]
        if self._among_others:
            kinds = [kind for kind in (_MODEL, _ADAPTER) if any(map(kind.fullmatch, new))]
        return name in new or name == LOCK or any(kind.fullmatch(name) for kind in kinds)

    def _keep_others(self) -> None:
        storage = self._storage
        new = storage.names(self.path)
        for name in storage.names(self.out) if storage.exists(self.out) else ():
            if not self._replaces(name, new):
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

    def _exchange_files(self) -> None:
        """Move everything into OUT, and what it replaces out of it, which comes back after an error."""
        storage, out, old = self._storage, self.out, hidden(self.out, "replaced")
        new = [file for file in _files(storage, self.path) if str(file) != LOCK]
        moved: list[tuple[Path, Path]] = []
        made: list[Path] = []

        def move(files: Iterable[Path], source: Path, target: Path) -> None:
            for file in files:
                made.extend(storage.make_directories((target / file).parent))
                storage.rename(source / file, target / file)
                moved.append((source / file, target / file))
            for folder in {path.parent for pair in moved for path in pair}:
                storage.sync_directory(folder)

        try:
            made.extend(path for folder in (out, old) for path in storage.make_directories(folder))
            move(sorted(self._replaced(new), key=_is_entry, reverse=True), out, old)
            move([file for file in new if not _is_entry(file)], self.path, out)
            move(filter(_is_entry, new), self.path, out)
        except BaseException:
            for source, target in reversed(moved):
                storage.rename(target, source)
            _unmake(storage, made)
            raise
        self._discard(old)
        self._discard(self.path)

    def _replaced(self, new: list[Path]) -> Iterator[Path]:
        """The files in OUT that new ones replace; both by their path in it."""
        storage, out = self._storage, self.out
        for folder in {file.parent for file in new}:
            beside = [file.name for file in new if file.parent == folder]
            for name in storage.names(out / folder) if storage.is_directory(out / folder) else ():
                if (
                    self._replaces(name, beside)
                    and name != LOCK
                    and not storage.is_directory(out / folder / name)
                ):
                    yield folder / name

    def abandon(self) -> None:
        """Remove what was written, so that no later run can resume it."""
        self._storage.remove(self.path)
        _unmake(self._storage, self._made)
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

    def _noted_plan(self) -> bytes:
        """The plan of an earlier run; nothing if there is none."""
        try:
            return read_whole(self._storage, self.path / PLAN, _LARGEST_PLAN)
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


def _is_entry(name: str | Path) -> bool:
    """Whether a file says where the weights are that are in others."""
    return str(name).endswith(_ENTRIES)


def _files(storage: Storage, folder: Path, below: Path = Path()) -> Iterator[Path]:
    """The paths in a folder of all files there and in the folders it holds."""
    for name in storage.names(folder / below):
        if storage.is_directory(folder / below / name) and not storage.is_link(folder / below / name):
            yield from _files(storage, folder, below / name)
        else:
            yield below / name


def _unmake(storage: Storage, made: list[Path]) -> None:
    """Remove directories that were made, if they are empty."""
    for each in reversed(made):
        if not storage.names(each):
            storage.remove(each)
