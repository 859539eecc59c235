"""Two hosts, each a network namespace with a name of its own, and a cable between them that can be cut."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from accelz_cpu import native

pytestmark = pytest.mark.slow  # starts programs

ROOT = Path(__file__).parents[2]
TIMEOUT = 5.0  # seconds, of a collective
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


def start(host: str, rank: int, size: int) -> subprocess.Popen[str]:
    program = [sys.executable, "-m", "tests.backends.namespace_rank", str(rank), str(size)]
    named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', host, *program]
    return subprocess.Popen(
        ["ip", "netns", "exec", host, *named, ADDRESSES[0], str(PORT), str(TIMEOUT)],
        cwd=ROOT,
        env={**os.environ, "GLOO_SOCKET_IFNAME": CABLE, "ACCELZ_DEVICE": "cpu", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.timeout(120)
def test_two_ranks_on_each_of_two_hosts(hosts: list[str]) -> None:
    ranks = [start(hosts[rank // 2], rank, 4) for rank in range(4)]
    try:
        for rank in ranks:
            assert rank.stdout is not None
            assert json.loads(rank.stdout.readline()) == {"transport": "Hierarchy", "right": True}
        ip("-n", hosts[0], "link", "set", CABLE, "down")  # nothing tells the other side
        for rank in ranks:
            assert rank.stdin is not None
            print("go", file=rank.stdin, flush=True)
        for rank in ranks:
            end = json.loads(rank.communicate(timeout=60)[0])
            assert end["seconds"] < TIMEOUT + 2.0, end
            assert "hosts failed" in end["error"], end
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
