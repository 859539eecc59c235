"""Two hosts on one machine, each with a network and a name of its own, and a cable between them.

Ranks of a host reach each other as on any machine, through its loopback or its memory. What goes to the other
host crosses the cable, whose bandwidth is limited in each direction.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

from benchmarks.link import NEW_NETWORK, enter, run, system_call, throttle

NEW_NAME = 0x04000000  # CLONE_NEWUTS
COUNT = 2
INTERFACE = "eth0"
_OWN = {"net": "/proc/thread-self/ns/net", "uts": "/proc/thread-self/ns/uts"}

Place = Callable[[], AbstractContextManager[None]]
"""Makes a context in which this thread, and processes that it starts, are on a certain host."""


@dataclass(frozen=True)
class Hosts:
    """Two hosts. address: the first host's. places: one for each host."""

    address: str
    places: tuple[Place, ...]


@contextmanager
def two_hosts(gigabits: float) -> Iterator[Hosts]:
    """Put this thread on the first of two hosts during the block.

    gigabits: per second, that the cable carries each way. Raises LinkError if this user may not create
    networks, or iproute2 is missing.
    """
    with ExitStack() as stack:
        back = _kept(stack)
        stack.callback(_go, back)
        first, second = (_new_host(stack, f"host{index}") for index in range(COUNT))
        _go(first)
        with _inhabitant() as pid:  # a network is identified by a process in it
            _go(second)
            run("ip", "link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE, "netns", str(pid))
        for index, host in enumerate((first, second)):
            _go(host)
            _plug_in(_address(index), gigabits)
        _go(first)
        yield Hosts(_address(0), (_place(first, first), _place(second, first)))


def _address(index: int) -> str:
    return f"10.111.0.{index + 1}"


def _plug_in(address: str, gigabits: float) -> None:
    run("ip", "link", "set", "lo", "up")
    run("ip", "address", "add", f"{address}/24", "dev", INTERFACE)
    run("ip", "link", "set", INTERFACE, "up")
    throttle(INTERFACE, gigabits)


def _new_host(stack: ExitStack, name: str) -> list[int]:
    enter(NEW_NETWORK | NEW_NAME)
    socket.sethostname(name)
    return _kept(stack)


def _kept(stack: ExitStack) -> list[int]:
    """Descriptors of the namespaces that this thread is in, closed with `stack`."""
    found = [os.open(path, os.O_RDONLY) for path in _OWN.values()]
    for descriptor in found:
        stack.callback(os.close, descriptor)
    return found


def _go(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        system_call("setns", descriptor, 0)


def _place(there: list[int], back: list[int]) -> Place:
    @contextmanager
    def place() -> Iterator[None]:
        _go(there)
        try:
            yield
        finally:
            _go(back)

    return place


@contextmanager
def _inhabitant() -> Iterator[int]:
    """Keep a process in this thread's present namespaces during the block; gives its pid."""
    with subprocess.Popen(["sleep", "infinity"]) as process:
        try:
            yield process.pid
        finally:
            process.kill()
