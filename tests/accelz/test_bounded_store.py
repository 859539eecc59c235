"""Calls to a store whose host may stop, and waiting for keys."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
from torch.distributed import DistStoreError, HashStore, TCPStore

from accelz.conformance import cluster
from accelz.ranks.bounded_store import (
    BoundedStore,
    HostSilentError,
    MissingKeysError,
    bounded,
    limited,
    open_store,
    wait_for,
)

from .forked import python

LIMIT = 0.5


@dataclass
class Host:
    """A store hosted by another process, and this process's connection to it."""

    process: int
    store: BoundedStore

    def stop(self) -> None:
        os.kill(self.process, signal.SIGSTOP)
        while psutil.Process(self.process).status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)

    def go_on(self) -> None:
        os.kill(self.process, signal.SIGCONT)


def _host(pipe: Connection) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()


@pytest.fixture
def host() -> Iterator[Host]:
    cluster.prepare()
    context = multiprocessing.get_context("forkserver")
    here, there = context.Pipe()
    process = context.Process(target=_host, args=(there,), daemon=True)
    process.start()
    store = open_store("127.0.0.1", here.recv(), hosted_here=False, seconds=LIMIT)
    store.set("there", "yes")
    assert process.pid is not None
    yield Host(process.pid, store)
    process.kill()
    process.join()


def port(store: BoundedStore) -> int:
    return int(store.where.rpartition(":")[2])


CALLS: dict[str, Callable[[BoundedStore], Any]] = {
    "set": lambda store: store.set("key", "value" * 4_000_000),  # small ones await no answer
    "get": lambda store: store.get("there"),
    "found": lambda store: store.found(["there"]),
    "add": lambda store: store.add("count", 1),
    "check": lambda store: store.check(["there"]),
    "delete": lambda store: store.delete_key("there"),
    "wait": lambda store: store.wait(["never"]),
    "second connection": lambda store: store.beside().check(["there"]),
    "new connection": lambda store: open_store("127.0.0.1", port(store), False, 0.1).check(["there"]),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_call_to_a_host_that_is_silent_ends_and_names_it(
    host: Host, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accelz.ranks.bounded_store.SPARE", 0.5)
    host.stop()
    began = time.monotonic()
    with pytest.raises(HostSilentError, match=rf"{host.store.where}, has not answered .*stopped"):
        CALLS[name](host.store)
    assert time.monotonic() - began < 10 * LIMIT


def test_torchs_own_calls_while_a_group_is_made_have_a_limit(tmp_path: Path) -> None:
    script = """
        import os, signal, time
        from torch.distributed import TCPStore
        from accelz.roles import collectives

        collectives.SPARE = 0.5
        read, write = os.pipe()
        host = os.fork()
        if not host:
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            os.write(write, str(store.port).encode())
            time.sleep(60)
            os._exit(0)
        store = TCPStore("127.0.0.1", int(os.read(read, 10)), is_master=False)
        os.kill(host, signal.SIGSTOP)
        try:
            collectives.Collectives().init(0.5, 0, 2, store)
        except collectives.CollectiveError as error:
            print(error)
        os.kill(host, signal.SIGKILL)
    """
    said = python(tmp_path, script).stdout
    assert "making a group of ranks has not ended: the host of the job's store, 127.0.0.1:" in said


def test_a_call_waits_no_longer_than_the_silence_lasts(host: Host) -> None:
    """Once one call has found the host silent, others need not find it again, until it speaks."""
    host.stop()
    with pytest.raises(HostSilentError):
        host.store.check(["there"])
    began = time.monotonic()
    for store in (host.store, host.store.under("some"), host.store.within(LIMIT / 2)):
        with pytest.raises(HostSilentError):
            store.add("count", 1)
    assert time.monotonic() - began < LIMIT / 2
    host.go_on()
    assert host.store.within(20.0).add("count", 1) == 1, "what was given up is not done later"


def test_a_host_that_stops_for_less_than_the_limit_is_waited_for(host: Host) -> None:
    store = host.store.within(20.0)
    with ThreadPoolExecutor(1) as pool:
        host.stop()
        answer = pool.submit(store.get, "there")
        time.sleep(LIMIT)
        assert not answer.done()
        host.go_on()
        assert answer.result() == b"yes"


def test_a_host_that_is_gone_is_not_called_silent(host: Host) -> None:
    os.kill(host.process, signal.SIGKILL)
    time.sleep(0.1)
    with pytest.raises(RuntimeError) as raised:
        host.store.check(["there"])
    assert not isinstance(raised.value, HostSilentError)


def test_stores_of_one_connection_share_it_and_see_their_own_keys() -> None:
    native = HashStore()
    store = bounded(native, 10.0)
    inner = store.under("a").under("b")
    inner.set("key", "value")
    assert store.get("a/b/key") == inner.for_torch.get("key") == b"value"
    assert bounded(native, 1.0).check(["a/b/key"])
    assert inner.delete_key("key")
    assert not store.check(["a/b/key"])
    assert inner.beside() is not inner
    assert inner._connection is bounded(native, 1.0)._connection is inner.beside()._connection


def test_what_a_call_raises_reaches_whoever_asked() -> None:
    with pytest.raises(TimeoutError, match="its own"):
        bounded(HashStore(), 10.0)._ask(lambda store: _raise(TimeoutError("its own")))
    with pytest.raises(TimeoutError, match="its own"):
        limited(lambda: _raise(TimeoutError("its own")), 10.0, "raising", "nowhere")


def test_a_limited_call_may_be_given_up() -> None:
    with pytest.raises(DistStoreError, match=r"^gave up sleeping: tired$"):
        limited(lambda: time.sleep(2), 10.0, "sleeping", "nowhere", give_up=lambda: "tired")


def _raise(error: Exception) -> None:
    raise error


def test_a_wait_may_be_given_up_and_names_the_keys_that_are_missing() -> None:
    store = bounded(HashStore(), 10.0)
    store.set("there", "")
    asked = itertools.count()
    told = r"gave up after 0\.\d s: tired, .*not set: missing$"
    with pytest.raises(MissingKeysError, match=told) as raised:
        wait_for(store, ["there", "missing"], 10, give_up=lambda: "tired" * (next(asked) == 3))
    assert next(asked) == 4
    assert raised.value.missing == ("missing",)


def test_what_is_there_is_not_given_up() -> None:
    store = bounded(HashStore(), 10.0)
    store.set("there", "")
    wait_for(store, ["there"], 10, give_up=lambda: "tired")


def test_what_comes_while_a_wait_is_given_up_has_come() -> None:
    """Nobody is told that nothing is missing."""
    store = bounded(HashStore(), 10.0)

    def late() -> str:
        store.set("late", "")
        return "tired"

    wait_for(store, ["late"], 10, give_up=late)
