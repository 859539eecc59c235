"""Waiting for keys of a store without blocking it for other threads.

A TCPStore has one connection, which is blocked while a thread waits for a key: two threads that wait for
each other's counterparts, in opposite order on two ranks, would never be answered. A connection for each
thread (`Store.clone`) takes descriptors and, where names cannot be looked up, seconds. So this module polls
the keys. (It does not poll with short waits, because c10d logs a warning for each wait that times out.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import Store

SHORTEST, LONGEST = 0.0005, 0.25
"""Bounds of the seconds between two polls."""

PAUSE = 0.02
"""The pause, as a fraction of the time waited so far: short waits end promptly, long ones poll rarely."""

ASKED_AFTER = 0.5
"""Seconds of waiting after which `give_up` is asked; most waits are shorter."""


def wait_for(
    store: Store, keys: Sequence[str], timeout: float, give_up: Callable[[], str] = lambda: ""
) -> None:
    """Return when all keys are set.

    Raises DistStoreError after `timeout` seconds, or once `give_up()` returns a reason for it, which is asked
    after ASKED_AFTER seconds.
    """
    begun = time.monotonic()
    while not store.check(list(keys)):
        waited = time.monotonic() - begun
        reason = give_up() if waited > ASKED_AFTER else ""
        if waited > timeout or reason:
            missing = ", ".join(key for key in keys if not store.check([key]))
            how = f"gave up after {waited:.1f} s: {reason}," if reason else f"timed out after {timeout:g} s"
            raise dist.DistStoreError(f"{how} waiting for keys that other ranks have not set: {missing}")
        time.sleep(min(max(SHORTEST, PAUSE * waited), LONGEST, timeout - waited))


class PolledStore(Store):
    """Another store for a library that waits for keys: it polls. Keep it as long as the library has it."""

    def __init__(self, store: Store, timeout: float) -> None:
        super().__init__()
        self._store = store
        self._timeout = timeout

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        wait_for(self._store, [key], self._timeout)
        return self._store.get(key)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        wait_for(self._store, keys, timeout.total_seconds() if timeout else self._timeout)
