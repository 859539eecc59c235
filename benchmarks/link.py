"""A network of this process's own, whose loopback carries no more than it is told to.

What ranks of one machine send each other through sockets then takes the time that it would on a slower cable,
and the processors are free meanwhile: unlike the loopback of the machine, which moves bytes as fast as the
cores that compute can copy them.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

NEW_NETWORK = 0x40000000  # CLONE_NEWNET
BURST = "256kb"  # what may leave at once: a few of the loopback's largest packets
OWN = "/proc/thread-self/ns/net"


class LinkError(Exception):
    """No such network could be made."""


@contextmanager
def limited(gigabits: float | None) -> Iterator[None]:
    """In the block this thread, and the processes and threads that it starts, are on such a loopback.

    gigabits: per second, of all that is sent; None changes nothing. Raises LinkError where this user may make
    no network, or iproute2 is missing.
    """
    if gigabits is None:
        yield
        return
    with open(OWN) as before:
        enter(NEW_NETWORK)
        try:
            run("ip", "link", "set", "lo", "up")
            throttle("lo", gigabits)
            yield
        finally:
            system_call("setns", before.fileno(), NEW_NETWORK)


def enter(flags: int) -> None:
    """Put this thread into new namespaces. Raises LinkError where this user may make none."""
    try:
        system_call("unshare", flags)
    except OSError as error:
        raise LinkError(f"this user may not make a network of its own: {error.strerror}") from error


def throttle(interface: str, gigabits: float) -> None:
    """Let an interface of this thread's network send no more than so much a second. Raises LinkError."""
    rate = ["rate", f"{round(gigabits * 1000)}mbit", "burst", BURST, "latency", "1s"]
    run("tc", "qdisc", "add", "dev", interface, "root", "tbf", *rate)


def system_call(function: str, *arguments: int) -> None:
    """One of libc's. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, function)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def run(*command: str) -> None:
    """One of iproute2's commands. Raises LinkError."""
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=20)
    except FileNotFoundError as error:
        raise LinkError(f"a limited link needs {command[0]}, of iproute2") from error
    except subprocess.CalledProcessError as error:
        raise LinkError(f"{' '.join(command)}: {error.stderr.strip()}") from error
