"""A network of this process's own, with a loopback of limited bandwidth.

What ranks of one machine send each other through sockets then takes as long as on a slower cable, and the
processors are free meanwhile. The machine's own loopback moves bytes as fast as the computing cores can copy
them.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

NEW_NETWORK = 0x40000000  # CLONE_NEWNET
BURST = "256kb"  # may leave at once: a few of the loopback's largest packets
OWN = "/proc/thread-self/ns/net"


class LinkError(Exception):
    """A network with limited bandwidth could not be created."""


@contextmanager
def limited(gigabits: float | None) -> Iterator[None]:
    """Put this thread, and the processes and threads that it starts, on a limited loopback during the block.

    gigabits: per second, for everything that is sent; None changes nothing. Raises LinkError if this user may
    not create networks, or iproute2 is missing.
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
    """Put this thread into new namespaces. Raises LinkError if this user may not create any."""
    try:
        system_call("unshare", flags)
    except OSError as error:
        raise LinkError(f"this user may not create its own network: {error.strerror}") from error


def throttle(interface: str, gigabits: float) -> None:
    """Limit what an interface of this thread's network sends, in Gbit/s. Raises LinkError."""
    rate = ["rate", f"{round(gigabits * 1000)}mbit", "burst", BURST, "latency", "1s"]
    run("tc", "qdisc", "add", "dev", interface, "root", "tbf", *rate)


def system_call(function: str, *arguments: int) -> None:
    """Call a function of libc. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, function)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def run(*command: str) -> None:
    """Run a command of iproute2. Raises LinkError."""
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=20)
    except FileNotFoundError as error:
        raise LinkError(f"a limited link needs {command[0]}, from iproute2") from error
    except subprocess.CalledProcessError as error:
        raise LinkError(f"{' '.join(command)}: {error.stderr.strip()}") from error
