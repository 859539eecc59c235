"""Whether the processes that hold a job together are there: torchrun's, and the one that has the store.

Ranks that need neither for their steps would otherwise train on alone when these are killed, and nobody would
know of them.
"""

from __future__ import annotations

import time

from accelz import Group
from accelz.ranks.bounded_store import HostSilentError
from accelz.ranks.launcher import Launcher
from zero.communication.lookout import LONGEST, keep_looking
from zero.communication.reports import hurried

ASK_EVERY = 10.0
"""Seconds between two calls to the store."""


class Launch:
    """The launch of a group of ranks.

    gone: which process has ended, "" while none has. It is found within 30 seconds. A process that is stopped
    has not ended.
    """

    def __init__(self, group: Group) -> None:
        self.gone = ""
        self.patience = LONGEST
        self._launcher = Launcher.find()
        self._store = hurried(group) if group.size > 1 else None
        self._asked = time.monotonic()
        self._refused = False
        if self._launcher or self._store:
            keep_looking(self)

    def look(self) -> None:
        """See what has ended. Called by another thread."""
        if self._launcher and self._launcher.has_ended():
            self.gone = str(self._launcher)
        elif self._store and time.monotonic() - self._asked > ASK_EVERY:
            self._asked = time.monotonic()
            self._ask()

    def _ask(self) -> None:
        """Call the store; it is gone when it has refused twice."""
        assert self._store is not None
        try:
            self._store.check(["zero/launch"])
            self._refused = False
        except HostSilentError:
            pass
        except RuntimeError:
            if self._refused:
                self.gone = f"the process that has the job's store ({self._store.where})"
            self._refused = True
