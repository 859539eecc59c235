"""Messages between the ranks of a save, through the job's store; usable during training, from any thread.

Collectives cannot be used: those of a background save would interleave with those of the training step.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import InitVar, dataclass
from typing import Any

from accelz import Group
from accelz.ranks.bounded_store import MissingKeysError, wait_for
from accelz.ranks.peers import Peers
from zero.errors import CommunicationError

JOINED = "join"
"""The topic on which every rank publishes at the beginning what keeps it from the save, if anything does."""

JOIN_SECONDS = 10.0
"""How long a rank whose program has failed waits for ranks that have not joined the save."""


Waiting = Callable[[float], AbstractContextManager[Any]]
"""Wraps a wait for other ranks. It is called with the seconds after which the wait fails."""


def program_failed() -> bool:
    """Whether the main thread is gone, after an exception that nothing caught."""
    uncaught = hasattr(sys, "last_value") or hasattr(sys, "last_exc")
    return uncaught and not threading.main_thread().is_alive()


@dataclass(eq=False, repr=False)
class SaveMessages:
    """The messages of one save. key: the prefix of its keys in the store, the same on every rank.

    peers: the ranks' processes. waiting: wraps every wait. whereabouts(ranks): says where ranks are that do
    not answer, "" if it is not known.
    """

    group: InitVar[Group]
    key: str
    peers: Peers
    waiting: Waiting = nullcontext
    whereabouts: Callable[[Iterable[int]], str] = lambda ranks: ""

    def __post_init__(self, group: Group) -> None:
        self.rank = group.rank
        self.ranks = range(group.size)
        self._timeout = group.timeout
        with self._answering("messages"):
            self._store = group.store.beside()  # training may block on the first connection

    def publish(self, topic: str, value: Any) -> None:
        """Leave this rank's JSON value for a topic, for any rank to collect."""
        with self._answering(topic):
            self._store.set(self._name(topic, self.rank), json.dumps(value))

    def collect(
        self,
        topic: str,
        ranks: Iterable[int],
        patience: float = 1.0,
        give_up: Callable[[], bool] | None = None,
    ) -> dict[int, Any]:
        """What these ranks have published on a topic, by rank. patience: how many timeouts to wait.

        Raises CommunicationError if a rank has published nothing by then or is known to have ended, or once
        `give_up()`: by default, when this rank's program has failed and one of the ranks has not joined for
        JOIN_SECONDS.
        """
        names = {rank: self._name(topic, rank) for rank in ranks}
        seconds, began = patience * self._timeout, time.monotonic()

        def why_not() -> str:
            over = give_up() if give_up else self._nobody_comes(names, began)
            return self.peers.ended(self._store, names) or ("this rank's program has failed" if over else "")

        with self._answering(topic), self.waiting(seconds):
            try:
                said = wait_for(self._store, list(names.values()), seconds, why_not)
            except MissingKeysError as error:
                missing = [rank for rank, name in names.items() if name in error.missing]
                raise self._not_there(topic, missing, names, time.monotonic() - began) from error
            return {rank: json.loads(value) for rank, value in zip(names, said, strict=True)}

    def _nobody_comes(self, ranks: Iterable[int], began: float) -> bool:
        late = time.monotonic() - began > JOIN_SECONDS
        return (
            late and program_failed() and not self._store.check([self._name(JOINED, rank) for rank in ranks])
        )

    def forget(self, topic: str, ranks: Iterable[int]) -> None:
        """Remove messages that everybody has read."""
        with self._answering(topic):
            for rank in ranks:
                self._store.delete_key(self._name(topic, rank))

    def _name(self, topic: str, rank: int) -> str:
        return f"{self.key}/{topic}/{rank}"

    @contextmanager
    def _answering(self, topic: str) -> Iterator[None]:
        """Raise CommunicationError if the store fails in the block."""
        try:
            yield
        except CommunicationError:
            raise
        except RuntimeError as error:
            raise CommunicationError(
                f"while saving a checkpoint, rank {self.rank} could not exchange {topic!r} with the "
                f"others: the job's store does not respond: {error}. Look at their output first"
            ) from error

    def _not_there(
        self, topic: str, missing: Sequence[int], names: Mapping[int, str], seconds: float
    ) -> CommunicationError:
        gone = self.peers.ended(self._store, names)
        how = " gave up" if gone else " timed out"
        if program_failed():
            how = ", whose program has failed, gave up"
        told = [gone] if gone else [self.whereabouts(missing), "every rank must call save_checkpoint"]
        ranks = ", ".join(map(str, missing))
        return CommunicationError(
            f"while saving a checkpoint, rank {self.rank}{how} after {seconds:.0f} s waiting for {topic!r} "
            f"from rank(s) {ranks}: {': '.join(filter(None, told))}; look at "
            "the output of those ranks first"
        )
