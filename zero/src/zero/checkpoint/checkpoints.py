"""One engine's checkpoints: the arguments checked, saves one at a time, loads after them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from zero.checkpoint.engine_state import EngineParts
from zero.checkpoint.load import Loaded, Options, load
from zero.checkpoint.publication import check_name
from zero.checkpoint.save import Saver
from zero.checkpoint.storage import DISK, Storage
from zero.errors import UsageError
from zero.tiers.values import lasting

_engines = itertools.count()


class Checkpoints:
    """Saves and loads an engine's state. storage: the file system; tests put another in its place."""

    def __init__(self, engine: EngineParts) -> None:
        self.storage: Storage = DISK
        self._engine = engine
        self._saver = Saver(engine, f"zero/checkpoints{next(_engines)}")

    @lasting()
    def save(
        self,
        path: str | Path,
        steps: int,
        state: Mapping[str, Any],
        rank_state: Mapping[str, Any],
        keep_last: int | None,
        async_: bool,
    ) -> None:
        """See Engine.save_checkpoint. steps: optimizer steps taken."""
        where = Path(path).absolute()
        check_name(where)
        for name, given in (("state", state), ("rank_state", rank_state)):
            if not isinstance(given, Mapping):
                raise UsageError(
                    f"{name} has to be a dict, got {type(given).__name__}; the whole path of the checkpoint "
                    "is the first argument: save_checkpoint('runs/a/step-100', {'epoch': 3})"
                )
        if keep_last is not None and keep_last < 1:
            raise UsageError(f"keep_last must be at least 1, got {keep_last}; None removes nothing")
        self._saver.save(self.storage, where, steps, state, rank_state, keep_last, async_)

    @lasting()
    def load(self, path: str | Path, options: Options, before_change: Callable[[], None]) -> Loaded:
        """See Engine.load_checkpoint."""
        self._saver.wait()
        return load(self._engine, self.storage, Path(path).absolute(), options, before_change)

    def wait(self) -> None:
        """Until the save in the background is over; raises its error."""
        self._saver.wait()
