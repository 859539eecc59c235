"""Meeting through torchrun's store, which outlives the processes that torchrun restarts.

torch's groups keep the addresses of ranks under the same keys in every attempt, so that restarted ranks would
find those of the dead. Here every attempt gets a prefix of its own. Nothing in the environment numbers the
attempts (each machine counts only its own failures), so rank 0 chooses the prefix and answers the greetings
of the other ranks with it. Greetings of earlier attempts may still be there: each is unique, and an answer
is to one of them.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from uuid import uuid4

from torch.distributed import DistStoreError, Store, TCPStore
from torch.distributed.distributed_c10d import PrefixStore

from accelz.polled_store import LONGEST, PAUSE, SHORTEST, wait_for

_PREFIX = "accelz/attempts"


def may_restart() -> bool:
    """Whether torchrun has started this process: it may restart all processes of a job, when one fails or the
    number of machines changes, and keeps its store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def store_of_attempt(rank: int, size: int, timeout: float) -> Store:
    """Return torchrun's store with a prefix for this attempt. Every rank must call this.

    Raises DistStoreError if a rank does not within `timeout` seconds.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout))
    return PrefixStore(f"{_PREFIX}/{meet(store, rank, size, timeout)}", store)


def meet(store: Store, rank: int, size: int, timeout: float) -> str:
    """Return a word that is the same on all ranks that are there now, and has never been returned before."""
    own = uuid4().hex
    if rank == 0:
        _answer(store, own, size, timeout)
        return own
    store.set(f"{_PREFIX}/greeting/{rank}", own)
    answer = f"{_PREFIX}/answer/{own}"
    wait_for(store, [answer], timeout)
    word = store.get(answer).decode()
    store.delete_key(answer)
    store.set(f"{_PREFIX}/heard/{word}/{rank}", "")
    return word


def _answer(store: Store, word: str, size: int, timeout: float) -> None:
    """Answer every rank's newest greeting, until all have heard it."""
    answered: dict[int, bytes] = {}
    absent, began = set(range(1, size)), time.monotonic()
    while absent:
        for rank in sorted(absent):
            heard, greeting = f"{_PREFIX}/heard/{word}/{rank}", f"{_PREFIX}/greeting/{rank}"
            if store.check([heard]):
                store.delete_key(heard)
                absent.remove(rank)
            elif store.check([greeting]) and (said := store.get(greeting)) != answered.get(rank):
                store.set(f"{_PREFIX}/answer/{said.decode()}", word)
                answered[rank] = said
        waited = time.monotonic() - began
        if absent and waited > timeout:
            names = ", ".join(map(str, sorted(absent)))
            raise DistStoreError(f"timed out after {timeout:g} s waiting for rank(s) {names} of this attempt")
        if absent:
            time.sleep(min(max(SHORTEST, PAUSE * waited), LONGEST))
