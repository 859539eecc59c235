"""A save in a thread of its own, and what came of it."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from zero.checkpoint.save_job import RankSave
from zero.errors import CheckpointError

START_SECONDS = 5.0
"""How long a thread may take to begin. Where Ctrl-C interrupts its start, it never does."""

_log = logging.getLogger("zero")


class BackgroundSave:
    """One job in the background. path: of the checkpoint, for messages."""

    def __init__(self, job: RankSave, path: Path) -> None:
        self._job = job
        self._path = path
        self._failure: BaseException | None = None
        self._begun = threading.Event()
        self._claim = threading.Lock()  # whose it is: the thread has begun, or is waited for no longer
        self._thread = threading.Thread(target=self._run, name=f"saving {path}")

    def start(self) -> None:
        self._thread.start()

    def outcome(self) -> BaseException | None:
        """Wait until the save is over, and return its error, if any. May be interrupted and called again."""
        if not self._begun.wait(START_SECONDS) and self._claim.acquire(blocking=False):
            return CheckpointError(
                f"the save of {self._path} in the background was interrupted before it began: call "
                "save_checkpoint again on every rank"
            )
        self._begun.wait()
        self._thread.join()
        return self._failure

    def _run(self) -> None:
        """The thread's body."""
        if not self._claim.acquire(blocking=False):
            return
        self._begun.set()
        try:
            self._job.run()
        except BaseException as error:
            self._failure = error
            if not self._job.shared:  # otherwise rank 0 says so
                _log.error("the checkpoint %s could not be saved: %s", self._path, error)
