"""Meeting through the job's store, which may outlive the processes that torchrun restarts.

torch's groups keep the addresses of ranks under the same keys in every attempt, so that restarted ranks would
find those of the dead. Here every attempt gets a prefix of its own. Nothing in the environment numbers the
attempts (each machine counts only its own failures), so rank 0 chooses the prefix, its word, and answers the
greetings of the other ranks with it. Greetings of earlier attempts may still be there: each is unique, and an
answer is to one of them.

No rank goes on before all are there, and where that cannot be, every rank that is there says who is missing:
rank 0 tells the others, since its process may hold the store.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from uuid import uuid4

from torch.distributed import DistStoreError, Store

from accelz.ranks.bounded_store import (
    ASKED_AFTER,
    LONGEST,
    PAUSE,
    SHORTEST,
    BoundedStore,
    MissingKeysError,
    open_store,
    wait_for,
)
from accelz.ranks.local_ranks import LocalRanks

_PREFIX = "accelz/attempts"

PARTING = 5.0
"""Seconds that rank 0 waits, when ranks are missing, until the others have heard so."""


def may_restart() -> bool:
    """Whether torchrun has started this process: it may restart all processes of a job, when one fails or the
    number of machines changes, and keeps its store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def store_of_attempt(rank: int, size: int, timeout: float) -> Store:
    """Return the job's store with a prefix for this attempt, once all ranks have called this.

    Raises DistStoreError if a rank does not within `timeout` seconds, or as soon as one is known to have
    ended.
    """
    ended = LocalRanks().ended
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = open_store(address, port, rank == 0 and not may_restart(), timeout, ended)
    return store.under(f"{_PREFIX}/{meet(store, rank, size, timeout, ended)}").for_torch


def meet(
    store: BoundedStore, rank: int, size: int, timeout: float, ended: Callable[[], str] = lambda: ""
) -> str:
    """Return a word that is the same on all ranks that are there now, and has never been returned before.

    ended(): says which ranks are known to have ended, "" while none is.
    """
    own = uuid4().hex
    if rank == 0:
        _gather(store.under(_PREFIX), own, size, timeout, ended)
        return own
    return _greet(store.under(_PREFIX), own, rank, size, timeout, ended)


def _greet(
    store: BoundedStore, own: str, rank: int, size: int, timeout: float, ended: Callable[[], str]
) -> str:
    """Have rank 0's word, and wait until it says that all ranks have."""
    store.set(f"greeting/{rank}", own)
    try:
        (answer,) = wait_for(store, [f"answer/{own}"], timeout, ended)
    except MissingKeysError as error:
        raise DistStoreError(ended() or f"rank(s) 0 did not come within {timeout:g} s") from error
    word = answer.decode()
    store.delete_key(f"answer/{own}")
    store.set(f"heard/{word}/{rank}", "")
    try:
        (outcome,) = wait_for(store, [f"outcome/{word}"], timeout, ended)
    except MissingKeysError as error:
        problem = ended() or _late([r for r in range(1, size) if not _has_heard(store, word, r)], timeout)
        store.set(f"told/{word}/{rank}", "")
        store.set(f"problem/{word}", problem)
        raise DistStoreError(problem) from error
    problem = outcome.decode()
    if problem:
        store.set(f"told/{word}/{rank}", "")
        raise DistStoreError(problem)
    return word


def _gather(store: BoundedStore, word: str, size: int, timeout: float, ended: Callable[[], str]) -> None:
    """On rank 0: have all ranks come, and tell them so, or what keeps some from coming."""
    absent, problem = _answer(store, word, size, timeout, ended)
    store.set(f"outcome/{word}", problem)
    if problem:
        there = [rank for rank in range(1, size) if rank not in absent]
        with suppress(DistStoreError):
            wait_for(store, [f"told/{word}/{rank}" for rank in there], min(PARTING, timeout))
        raise DistStoreError(problem)
    for rank in range(1, size):
        store.delete_key(f"heard/{word}/{rank}")


def _answer(
    store: BoundedStore, word: str, size: int, timeout: float, ended: Callable[[], str]
) -> tuple[set[int], str]:
    """Answer every rank's newest greeting until all have heard it. Returns the ranks that have not, and why
    they will not."""
    answered: dict[int, bytes] = {}
    absent, began, problem = set(range(1, size)), time.monotonic(), ""
    while absent and not problem:
        for rank in sorted(absent):
            if _has_heard(store, word, rank):
                absent.remove(rank)
            elif store.check([f"greeting/{rank}"]):
                said = store.get(f"greeting/{rank}")
                if said != answered.get(rank):
                    store.set(f"answer/{said.decode()}", word)
                    answered[rank] = said
        waited = time.monotonic() - began
        if absent:
            problem = _problem(store, word, ended) if waited > ASKED_AFTER else ""
            problem = problem or (_late(absent, timeout) if waited > timeout else "")
            time.sleep(min(max(SHORTEST, PAUSE * waited), LONGEST))
    return absent, problem


def _problem(store: BoundedStore, word: str, ended: Callable[[], str]) -> str:
    """Why not all ranks will come, if this rank or another one knows."""
    key = f"problem/{word}"
    return ended() or (store.get(key).decode() if store.check([key]) else "")


def _has_heard(store: BoundedStore, word: str, rank: int) -> bool:
    return store.check([f"heard/{word}/{rank}"])


def _late(absent: Collection[int], timeout: float) -> str:
    ranks = ", ".join(map(str, sorted(absent))) or "0"
    return f"rank(s) {ranks} did not come within {timeout:g} s"
