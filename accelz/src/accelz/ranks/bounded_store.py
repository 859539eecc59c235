"""The one way to a job's store: every call has a limit, even if the store's host says nothing at all.

A host that is gone resets connections. One that is stopped or cut off does not, and then every call of
torch's client hangs, with whatever timeout: when that has passed, the client tells the host so and waits for
its answer. So the calls of one connection are made by a thread, and whoever asks waits for the thread.

A connection is blocked while a call waits for a key: two threads that wait for each other's counterparts, in
opposite order on two ranks, would never be answered. A connection for each thread takes descriptors and,
where names cannot be looked up, seconds. So keys are polled. (Not with short waits, because c10d logs a
warning for each wait that times out.)
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, TypeVar
from weakref import WeakValueDictionary, finalize

import torch.distributed as dist
from torch.distributed import DistStoreError, PrefixStore, Store, TCPStore

T = TypeVar("T")

SHORTEST, LONGEST = 0.0005, 0.25
"""Bounds of the seconds between two polls."""

PAUSE = 0.02
"""The pause, as a fraction of the time waited so far: short waits end promptly, long ones poll rarely."""

ASKED_AFTER = 0.5
"""Seconds of waiting after which `give_up` is asked; most waits are shorter."""

SPARE = 10.0
"""Seconds beyond its own limit that torch is given for what it does with a store by itself."""


class HostSilentError(DistStoreError):
    """The store's host has not answered within the limit."""


class MissingKeysError(DistStoreError):
    """Keys were not set in time. missing: which, at least one."""

    def __init__(self, how: str, missing: Sequence[str]) -> None:
        super().__init__(f"{how} waiting for keys that other ranks have not set: {', '.join(missing)}")
        self.missing = tuple(missing)


def limited(
    call: Callable[[], T], seconds: float, what: str, where: str, give_up: Callable[[], str] = lambda: ""
) -> T:
    """Return `call()`, made by a thread of its own. what: it does. where: the host of the store it needs.

    Raises HostSilentError after `seconds`, or DistStoreError once `give_up()` returns a reason for it; the
    thread then stays behind.
    """
    calls, result = _Calls(), Future[T]()
    calls.queue.put((call, result))
    calls.queue.put(None)
    Thread(target=_make, args=(calls,), name=f"accelz: {what}", daemon=True).start()
    begun = time.monotonic()
    try:
        while not result.done():
            with suppress(TimeoutError):
                return result.result(LONGEST)
            if reason := give_up():
                raise DistStoreError(f"gave up {what}: {reason}")
            if time.monotonic() - begun > seconds:
                raise HostSilentError(f"{what} has not ended: {_silent(where, seconds)}")
        return result.result()
    finally:
        del result  # its exception refers to this frame


def open_store(
    address: str, port: int, hosted_here: bool, seconds: float, give_up: Callable[[], str] = lambda: ""
) -> BoundedStore:
    """Connect to a store, or host it in this process. Raises what `limited` raises, and RuntimeError."""

    def connect() -> Store:
        return TCPStore(
            *(address, port),
            is_master=hosted_here,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
            multi_tenant=True,
            use_libuv=os.environ.get("USE_LIBUV", "1") == "1",  # as torch does
        )

    where = f"{address}:{port}"
    return bounded(limited(connect, seconds + SPARE, "connecting to the store", where, give_up), seconds)


def default_store(seconds: float) -> BoundedStore:
    """The store of torch's default process group. seconds: as in BoundedStore."""
    return bounded(dist.distributed_c10d._get_default_store(), seconds)


def bounded(store: Store, seconds: float) -> BoundedStore:
    """A store whose calls raise HostSilentError when its host has not answered for `seconds`.

    All that are made of one store use one connection and one thread.
    """
    if isinstance(store, BoundedStore):
        return store.within(seconds)
    with _lock:
        connection = _connections.get(id(store))
        if connection is None:
            connection = _connections[id(store)] = _Connection(store)
    return BoundedStore(connection, "", seconds)


class BoundedStore(Store):
    """A store, or the keys in it that begin with a prefix, over one connection.

    seconds: how long its host may be silent. Methods are torch's, with names that torch's C++ classes call; a
    library that is given one must be kept together with it. `get` and `wait` wait as `wait_for` does. Where
    its host is gone, calls raise RuntimeError.
    """

    def __init__(self, connection: _Connection, prefix: str, seconds: float) -> None:
        super().__init__()
        self._connection = connection
        self._prefix = prefix
        self.seconds = seconds

    @property
    def where(self) -> str:
        """The address of its host."""
        return self._connection.where

    @property
    def for_torch(self) -> Store:
        """The store itself, for torch's own groups only: calls to it have no limit."""
        store = self._connection.store
        return PrefixStore(self._prefix.removesuffix("/"), store) if self._prefix else store

    def under(self, prefix: str) -> BoundedStore:
        """The keys that begin with `prefix`, and a slash."""
        return BoundedStore(self._connection, f"{self._prefix}{prefix}/", self.seconds)

    def within(self, seconds: float) -> BoundedStore:
        """The same with another limit."""
        return BoundedStore(self._connection, self._prefix, seconds)

    def beside(self) -> BoundedStore:
        """The same over a second connection, one for all who ask: others' calls may block the first."""
        return BoundedStore(self._connection.second(self.seconds), self._prefix, self.seconds)

    def set(self, key: str, value: str) -> None:
        self._ask(lambda store: store.set(self._prefix + key, value))

    def get(self, key: str) -> bytes:
        return wait_for(self, [key], self.seconds)[0]

    def add(self, key: str, amount: int) -> int:
        return self._ask(lambda store: store.add(self._prefix + key, amount))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of these are set."""
        return self._ask(lambda store: store.check([self._prefix + key for key in keys]))

    def found(self, keys: Sequence[str]) -> list[bytes] | None:
        """The values of these, if all are set; in one call, since a job has thousands of ranks, perhaps."""
        names = [self._prefix + key for key in keys]
        return self._ask(lambda store: store.multi_get(names) if store.check(names) else None)

    def delete_key(self, key: str) -> bool:
        return self._ask(lambda store: store.delete_key(self._prefix + key))

    def num_keys(self) -> int:
        """How many keys the whole store has, whatever the prefix."""
        return self._ask(lambda store: store.num_keys())

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        wait_for(self, keys, timeout.total_seconds() if timeout else self.seconds)

    def _ask(self, call: Callable[[Store], T]) -> T:
        return self._connection.ask(call, self.seconds)


def wait_for(
    store: BoundedStore, keys: Sequence[str], timeout: float, give_up: Callable[[], str] = lambda: ""
) -> list[bytes]:
    """Return the values of the keys when all are set.

    Raises MissingKeysError after `timeout` seconds, or once `give_up()` returns a reason for it, which is
    asked after ASKED_AFTER seconds.
    """
    begun = time.monotonic()
    while (values := store.found(keys)) is None:
        waited = time.monotonic() - begun
        reason = give_up() if waited > ASKED_AFTER else ""
        if waited > timeout or reason:
            missing = [key for key in keys if not store.check([key])]
            if not missing:  # they have come meanwhile
                continue
            how = f"gave up after {waited:.1f} s: {reason}," if reason else f"timed out after {timeout:g} s"
            raise MissingKeysError(how, missing)
        time.sleep(min(max(SHORTEST, PAUSE * waited), LONGEST, timeout - waited))
    return values


class _Calls:
    """What a thread is to do: calls and their results, until None. since: when it began the one under way."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[Any] = SimpleQueue()
        self.since: float | None = None


def _make(calls: _Calls) -> None:
    while (asked := calls.queue.get()) is not None:
        call, result = asked
        if result.set_running_or_notify_cancel():
            calls.since = time.monotonic()
            try:
                result.set_result(call())
            except BaseException as error:
                result.set_exception(error)
            calls.since = None
        del asked, call, result  # the next may be long in coming


class _Connection:
    """A store, and the thread that calls it. where: its host."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.where = _address(store)
        self._second: _Connection | None = None
        self._lock = Lock()
        self._calls = _Calls()
        self._thread: Thread | None = None
        finalize(self, self._calls.queue.put, None).atexit = False

    def ask(self, call: Callable[[Store], T], seconds: float) -> T:
        """Return `call(store)`. Raises HostSilentError once a call has lasted `seconds`, whoever made it."""
        self._have_a_thread()
        result, store = Future[T](), self.store
        self._calls.queue.put((lambda: call(store), result))
        try:
            while not result.done():
                since = self._calls.since
                left = seconds - (time.monotonic() - since if since else 0)
                if left <= 0 and (result.cancel() or not result.done()):
                    raise HostSilentError(_silent(self.where, seconds))
                with suppress(TimeoutError):
                    return result.result(max(left, 0))
            return result.result()
        finally:
            del result  # its exception refers to this frame

    def second(self, seconds: float) -> _Connection:
        """Another connection to the same store, made at first use."""
        with self._lock:
            if self._second is None:
                store: Any = self.store
                store = limited(store.clone, seconds, "a second connection to the store", self.where)
                # One in memory has no connections.
                self._second = self if store is self.store else _Connection(store)
            return self._second

    def _have_a_thread(self) -> None:
        with self._lock:
            if self._thread is None or not self._thread.is_alive():  # a fork has none of its parent's threads
                self._thread = Thread(target=_make, args=(self._calls,), name="accelz store", daemon=True)
                self._thread.start()


_connections: WeakValueDictionary[int, _Connection] = WeakValueDictionary()
"""By the store's id, which is the store's as long as its connection is there and keeps it."""
_lock = Lock()


def _address(store: Store) -> str:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return f"{store.host}:{store.port}" if isinstance(store, TCPStore) else type(store).__name__


def _silent(where: str, seconds: float) -> str:
    return (
        f"the host of the job's store, {where}, has not answered for {seconds:g} s: its process (rank 0, or "
        "torchrun on the first machine) is stopped, or its machine cannot be reached"
    )
