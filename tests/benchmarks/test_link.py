from __future__ import annotations

import socket
import threading
import time

import pytest

from benchmarks import link

pytestmark = pytest.mark.slow  # starts programs

NBYTES = 30_000_000


@pytest.fixture(autouse=True)
def permitted() -> None:
    try:
        with link.limited(1.0):
            pass
    except link.LinkError as error:
        pytest.skip(str(error))


def seconds_to_send(nbytes: int) -> float:
    """Through the loopback that this thread is on."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def receive() -> None:
            connection, _ = server.accept()
            with connection:
                while connection.recv(1 << 20):
                    pass

        receiver = threading.Thread(target=receive)
        receiver.start()
        start = time.perf_counter()
        with socket.create_connection(server.getsockname()) as connection:
            connection.sendall(bytes(nbytes))
        receiver.join()
        return time.perf_counter() - start


def test_the_link_carries_what_it_is_told_to() -> None:
    free = seconds_to_send(NBYTES)
    with link.limited(0.5):
        limited = seconds_to_send(NBYTES)
    assert limited > 0.9 * NBYTES * 8 / 0.5e9 > free
    assert seconds_to_send(NBYTES) < 0.5 * limited, "the thread is back where it was"


def test_a_link_that_cannot_be_is_refused_and_left() -> None:
    free = seconds_to_send(NBYTES)
    with pytest.raises(link.LinkError, match="tc qdisc"), link.limited(0.0001):
        pass
    assert seconds_to_send(NBYTES) < 10 * free + 1
