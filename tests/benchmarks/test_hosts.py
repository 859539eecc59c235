from __future__ import annotations

import socket
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest
from benchmarks.job import Job

from benchmarks import hosts, link

pytestmark = pytest.mark.slow  # starts programs

NBYTES = 20_000_000
GIGABITS = 0.5


@pytest.fixture
def two() -> Iterator[hosts.Hosts]:
    try:
        made = hosts.two_hosts(GIGABITS)
        found = made.__enter__()
    except link.LinkError as error:
        pytest.skip(str(error))
    yield found
    made.__exit__(None, None, None)


def name() -> str:
    return subprocess.run(["uname", "-n"], capture_output=True, text=True, check=True).stdout.strip()


def seconds_from(place: hosts.Place, address: str) -> float:
    """To send to the first host, where this thread is."""
    with socket.create_server((address, 0)) as server:

        def send() -> None:
            with place(), socket.create_connection(server.getsockname()) as connection:
                connection.sendall(bytes(NBYTES))

        start = time.perf_counter()
        sender = threading.Thread(target=send)
        sender.start()
        connection, _ = server.accept()
        with connection:
            while connection.recv(1 << 20):
                pass
        sender.join()
        return time.perf_counter() - start


def test_a_cable_between_two_hosts(two: hosts.Hosts) -> None:
    inside, between = (seconds_from(place, two.address) for place in two.places)
    assert between > 0.9 * NBYTES * 8 / (GIGABITS * 1e9) > inside


def test_the_thread_is_back_where_it_was() -> None:
    before = name()
    try:
        with hosts.two_hosts(GIGABITS) as two:
            found = [name()]
            for place in two.places:
                with place():
                    found.append(name())
            found.append(name())
    except link.LinkError as error:
        pytest.skip(str(error))
    assert found == ["host0", "host0", "host1", "host0"]
    assert name() == before


class Where:
    """What a rank knows of its host."""

    def name(self) -> str:
        return socket.gethostname()


def test_ranks_are_shared_out(two: hosts.Hosts) -> None:
    with Job(Where, (), ranks=4, threads=1, limit=60, hosts=two) as job:
        assert job.call("name") == ["host0", "host0", "host1", "host1"]
