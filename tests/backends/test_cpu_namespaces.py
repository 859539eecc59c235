"""Two hosts, each a network namespace with a name of its own, and a cable between them that can be cut."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import pytest

from accelz.conformance import cluster
from accelz_cpu import native

from . import namespace_rank

pytestmark = pytest.mark.slow  # starts programs

TIMEOUT = 5.0  # seconds, of a collective
LATE = 10.0  # seconds by which a busy machine may be late
CABLE = "accelz0"
ADDRESSES = ("10.213.77.1", "10.213.77.2")
PORT = 29577


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], check=False, capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    if native.library() is None:
        pytest.skip("the native library was not built here")
    if not (shutil.which("ip") and shutil.which("unshare")):
        pytest.skip("needs iproute2 and unshare")
    names = [f"accelz-{os.getpid()}-{letter}" for letter in "ab"]
    try:
        _connect(names)
    except OSError as error:
        _remove(names)
        pytest.skip(f"this user may not make network namespaces: {error}")
    yield names
    _remove(names)


def _connect(names: list[str]) -> None:
    for name in names:
        ip("netns", "add", name)
    first, second = names
    ip("-n", first, "link", "add", CABLE, "type", "veth", "peer", "name", CABLE, "netns", second)
    for name, address in zip(names, ADDRESSES, strict=True):
        ip("-n", name, "address", "add", f"{address}/24", "dev", CABLE)
        ip("-n", name, "link", "set", CABLE, "up")
        ip("-n", name, "link", "set", "lo", "up")


def _remove(names: list[str]) -> None:
    for name in names:
        subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True, timeout=20)


def start(host: str, rank: int, size: int) -> tuple[BaseProcess, Connection]:
    cluster.prepare()
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    arguments = (theirs, host, CABLE, rank, size, ADDRESSES[0], PORT, TIMEOUT)
    process = context.Process(target=namespace_rank.main, args=arguments, daemon=True)
    process.start()
    theirs.close()
    return process, ours


def answer(pipe: Connection) -> dict[str, Any]:
    assert pipe.poll(60)
    return dict(pipe.recv())


@pytest.mark.timeout(120)
def test_two_ranks_on_each_of_two_hosts(hosts: list[str]) -> None:
    ranks = [start(hosts[rank // 2], rank, 4) for rank in range(4)]
    try:
        for _, pipe in ranks:
            assert answer(pipe) == {"transport": "Hierarchy", "right": True}
        ip("-n", hosts[0], "link", "set", CABLE, "down")  # nothing tells the other side
        for _, pipe in ranks:
            pipe.send("go")
        for _, pipe in ranks:
            end = answer(pipe)
            assert end["seconds"] < TIMEOUT + LATE, end
            assert "hosts failed" in end["error"], end
    finally:
        for process, _ in ranks:
            process.kill()
            process.join()
