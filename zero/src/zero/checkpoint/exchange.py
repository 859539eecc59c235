"""Messages between the ranks that save, over the job's store: usable beside training, from any thread.

Collectives would not do: a save in the background must not interleave with those of the training step.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Any

from accelz.collectives import Group
from zero.errors import CommunicationError

_SHORTEST, _LONGEST = 0.0003, 0.005  # seconds between looks for an answer
_LATE = 1 / 8  # of the time waited so far, that an answer may be noticed later


class Exchange:
    """The messages of one save. key: its prefix in the store, the same on every rank."""

    def __init__(self, group: Group, key: str) -> None:
        self.rank = group.rank
        self.ranks = range(group.size)
        self._timeout = group.timeout
        store: Any = group.store
        self._store = store.clone()  # a connection of its own: training may block on the other
        self._key = key

    def publish(self, topic: str, value: Any) -> None:
        """Leave a JSON value that any rank can collect."""
        self._call(lambda: self._store.set(self._name(topic, self.rank), json.dumps(value)), topic, [])

    def collect(self, topic: str, ranks: Iterable[int], patience: float = 1.0) -> dict[int, Any]:
        """What these ranks published, by rank. patience: how many timeouts to wait.

        Raises CommunicationError if a rank has published nothing by then.
        """
        waiting, values = list(ranks), {}
        begun = time.monotonic()
        while waiting:
            for rank in list(waiting):
                name = self._name(topic, rank)
                if self._call(lambda: self._store.check([name]), topic, waiting):  # noqa: B023
                    values[rank] = json.loads(self._call(lambda: self._store.get(name), topic, waiting))  # noqa: B023
                    waiting.remove(rank)
            waited = time.monotonic() - begun
            if waiting and waited > patience * self._timeout:
                raise CommunicationError(self._silence(topic, waiting))
            if waiting:
                time.sleep(min(max(_SHORTEST, _LATE * waited), _LONGEST))
        return values

    def forget(self, topic: str, ranks: Iterable[int]) -> None:
        """Remove messages that everybody has read."""
        for rank in ranks:
            self._call(lambda: self._store.delete_key(self._name(topic, rank)), topic, [])  # noqa: B023

    def _name(self, topic: str, rank: int) -> str:
        return f"{self._key}/{topic}/{rank}"

    def _call(self, operation: Any, topic: str, waiting: list[int]) -> Any:
        try:
            return operation()
        except RuntimeError as error:
            raise CommunicationError(
                f"{self._silence(topic, waiting)}: the job's store does not answer: {error}"
            ) from error

    def _silence(self, topic: str, waiting: list[int]) -> str:
        names = ", ".join(map(str, waiting))
        return (
            f"saving a checkpoint, rank {self.rank} waited {self._timeout:.0f} s for {topic!r} of rank(s) "
            f"{names or 'none'} in vain; look at their output first"
        )
