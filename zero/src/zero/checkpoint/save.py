"""Saves of one engine, one at a time: at once, or copied first and written in a thread."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

import zero
from zero.checkpoint import user_state
from zero.checkpoint.engine_state import EngineParts, collect, describe
from zero.checkpoint.exchange import Exchange
from zero.checkpoint.publication import Publication
from zero.checkpoint.rank_file import pack
from zero.checkpoint.save_job import Job
from zero.checkpoint.storage import Storage

_log = logging.getLogger("zero")


class Saver:
    """Prepares saves of one engine and runs them, one at a time."""

    def __init__(self, engine: EngineParts, key: str) -> None:
        self._engine = engine
        self._key = key
        self._count = 0
        self._arena: Tensor | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def save(
        self,
        storage: Storage,
        path: Path,
        steps: int,
        state: Mapping[str, Any],
        rank_state: Mapping[str, Any],
        keep_last: int | None,
        async_: bool,
    ) -> None:
        """Collective. See Engine.save_checkpoint."""
        self.wait()
        self._count += 1
        job = Job(
            Exchange(self._engine.communicator.group, f"{self._key}/save{self._count}"),
            storage,
            self._engine.accelerator,
            Publication(storage, path, keep_last),
        )
        try:
            self._prepare(job, steps, state, rank_state, async_)
        except Exception as error:
            job.failure = error
        if async_:
            self._thread = threading.Thread(target=self._run, args=(job, path), name=f"saving {path}")
            self._thread.start()
        else:
            self._arena = None
            job.run()

    def wait(self) -> None:
        """Until the save in the background is over; raises its error, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _prepare(
        self, job: Job, steps: int, state: Mapping[str, Any], rank_state: Mapping[str, Any], copy: bool
    ) -> None:
        """Everything that looks at the engine: in the background it changes meanwhile."""
        self._engine.accelerator.streams.synchronize()
        self._engine.communicator.check()  # nothing of a collective that failed is published
        job.mine = collect(self._engine, _plain(rank_state))
        if job.exchange.rank == 0:
            job.described = {
                "zero": zero.__version__,
                "created": time.time(),
                "steps": steps,
                **describe(self._engine, job.mine.parts),
                "state": user_state.encode(_plain(state), "state", job.mine.parts, "state"),
            }
        if copy:
            packed = pack(self._engine.accelerator, job.mine.parts, self._arena)
            job.mine.parts, job.packed, self._arena = packed

    def _run(self, job: Job, path: Path) -> None:
        try:
            job.run()
        except BaseException as error:
            self._failure = error
            _log.error("the checkpoint %s could not be saved: %s", path, error)


def _plain(state: Mapping[str, Any]) -> dict[str, Any]:
    """Objects that have a state dict, such as schedulers, as that."""
    return {
        name: value.state_dict() if callable(getattr(value, "state_dict", None)) else value
        for name, value in state.items()
    }
