"""One engine's checkpoints: saves, one at a time, written at once or in a thread, and loads.

A save and a load first wait for the save in the background.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from zero.average import averages_in
from zero.checkpoint import user_state
from zero.checkpoint.engine_state import EngineParts, average_parts, check_state, chosen_of, collect, describe
from zero.checkpoint.load import Loaded, LoadOptions, load
from zero.checkpoint.rank_file import pack
from zero.checkpoint.save_job import BackgroundSave, RankSave
from zero.checkpoint.save_messages import SaveMessages, Waiting
from zero.checkpoint.save_start import refuse, start
from zero.checkpoint.stored_names import StoredNames
from zero.config.paths import as_path
from zero.config.sizes import human
from zero.errors import UsageError
from zero.files.manifest import average_key
from zero.files.publication import Publication, check_name
from zero.files.storage import DISK, Storage
from zero.loading.together import all_or_none
from zero.observe.observation import Observation, timed
from zero.ranges import in_range
from zero.sharding.state_entries import Selection
from zero.tiers.values import lasting
from zero.version import __version__


class Checkpoints:
    """Saves and loads an engine's state. storage: the file system, which tests replace."""

    def __init__(self, engine: EngineParts) -> None:
        self.storage: Storage = DISK
        self._engine = engine
        self._saves = itertools.count(1)
        self._arena: Tensor | None = None  # host memory that background saves copy the state to
        self._background: BackgroundSave | None = None

    @lasting()
    @in_range("save")
    def save(
        self,
        path: str | Path,
        steps: int,
        state: Mapping[str, Any],
        rank_state: Mapping[str, Any],
        keep_last: int | None,
        async_: bool,
        check: Callable[[], None],
        select: Callable[[], Selection],
    ) -> None:
        """See Engine.save_checkpoint. steps: optimizer steps taken. check(): raises if there is nothing whole
        to save. select(): which parameters and buffers are saved; raises if that makes no sense.
        """
        if self._engine.communicator.failed:
            check()  # at once, as other ranks may not be there to be told
        communicator = self._engine.communicator
        waiting: Waiting = partial(communicator.waiting, f"save_checkpoint({str(path)!r})")
        key = f"{communicator.key}/save{next(self._saves)}"
        messages = SaveMessages(
            communicator.whole, key, communicator.peers, waiting, communicator.whereabouts
        )
        names = self._engine.stored_names() if communicator.grid.stages else None  # collective there
        try:
            self.wait()
            check()
            _check_arguments(state, rank_state, keep_last)
            where = as_path(path).absolute()
            check_name(where)
            publication = Publication(self.storage, where, keep_last)
            job = RankSave(messages, self.storage, self._engine.accelerator, publication)
            job.done = partial(_tell, communicator.observation, "save", where, job.seconds)
            names, chosen = names or self._engine.stored_names(), chosen_of(self._engine, select())
            with timed(job.seconds, "collect"):
                self._prepare(job, steps, state, rank_state, chosen, names, async_)
        except Exception as error:
            raise refuse(messages, error) from error
        except BaseException as interrupt:
            refuse(messages, interrupt)
            raise
        start(messages, set() if communicator.grid.stages else chosen)
        if async_:
            messages.waiting = nullcontext
            self._background = BackgroundSave(job, where)
            self._background.start()
        else:
            self._arena = None
            job.run()

    @lasting()
    @in_range("load")
    def load(self, path: str | Path, options: LoadOptions, before_change: Callable[[bool], None]) -> Loaded:
        """See Engine.load_checkpoint."""
        observation, seconds = self._engine.communicator.observation, dict[str, float]()
        with observation.within("checkpoint"), timed(seconds, "load"):
            self.wait()
            loaded = load(self._engine, self.storage, as_path(path).absolute(), options, before_change)
        if not options.weights_only:
            observation.load(loaded.steps)
        _tell(observation, "load", loaded.path, seconds, loaded.nbytes)
        return loaded

    def check_state(self) -> None:
        """Raise StateError, on every rank, if the optimizer has state that cannot be saved. Collective."""
        check = partial(check_state, self._engine)
        all_or_none(self._engine.communicator, "the optimizer's state", check, doing="check")

    def wait(self) -> None:
        """Wait until the save in the background is over, and raise its error, if any, once."""
        if self._background is not None:
            failure = self._background.outcome()
            self._background = None
            if failure is not None:
                raise failure

    @in_range("save", "collect")
    def _prepare(
        self,
        job: RankSave,
        steps: int,
        state: Mapping[str, Any],
        rank_state: Mapping[str, Any],
        chosen: set[str],
        names: StoredNames,
        copy: bool,
    ) -> None:
        """Do everything that reads the engine, which may change while the job runs in the background.

        chosen: names of what is saved of the model. names: under which it is stored. copy: copy the state, as
        a save in the background needs.
        """
        self._engine.accelerator.streams.synchronize()
        self._engine.communicator.check()  # results of a failed collective must not be published
        job.mine = collect(self._engine, _plain(rank_state), chosen, names)
        for key, average in averages_in(state).items():
            average.check_belongs(self._engine.units)
            job.mine.parts += average_parts(average.slices, partial(average_key, key), chosen, names)
        if job.messages.rank == 0:
            job.described = {
                "zero": __version__,
                "created": time.time(),
                "steps": steps,
                **describe(self._engine, job.mine.parts),
                "state": user_state.encode(_plain(state), "state", job.mine.parts, "state"),
            }
        if copy:
            job.mine.parts, self._arena = pack(self._engine.accelerator, job.mine.parts, self._arena)
            job.threads = False


def _tell(observation: Observation, kind: str, path: Path, seconds: dict[str, float], nbytes: int) -> None:
    speed = human(int(nbytes / max(seconds["write" if kind == "save" else kind], 1e-9)))
    text = f"{path}: {human(nbytes)} by this rank, at {speed}/s"
    observation.event(kind, text, seconds, nbytes)


def _check_arguments(state: object, rank_state: object, keep_last: int | None) -> None:
    for name, given in (("state", state), ("rank_state", rank_state)):
        if not isinstance(given, Mapping):
            raise UsageError(
                f"{name} must be a dict, got {type(given).__name__}; the checkpoint's full path is the first "
                "argument: save_checkpoint('runs/a/step-100', {'epoch': 3})"
            )
    if keep_last is not None and keep_last < 1:
        raise UsageError(f"keep_last must be at least 1, got {keep_last}; None removes nothing")


def _plain(state: Mapping[str, Any]) -> dict[str, Any]:
    """Replace objects that have a state_dict(), such as schedulers, by their state dict."""
    return {
        name: value.state_dict() if callable(getattr(value, "state_dict", None)) else value
        for name, value in state.items()
    }
