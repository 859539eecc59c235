"""Jobs of forked ranks: nothing keeps one from ending but its program, and then it says what does."""

from __future__ import annotations

import platform
import socket
import struct
import time
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from tests.zero.helpers.waiting import wait_until

from .forked import ended_together, held_port, started_ranks, threads_of_the_server

LINUX = tuple(int(number) for number in platform.release().split(".")[:2])
IP_LOCAL_PORT_RANGE = 51
"""Ports that Linux (6.3 or later) may give a socket which asks for any; socket has no name for it yet."""

STUCK = """
import threading, time

def stuck_in_a_thread():
    time.sleep(60)

threading.Thread(target=stuck_in_a_thread, daemon=True).start()

def stuck():
    print("begun", flush=True)
    time.sleep(60)

stuck()
"""


def test_at_its_limit_a_job_says_where_each_thread_of_its_ranks_is(tmp_path: Path) -> None:
    (tmp_path / "stuck.py").write_text(STUCK)
    running = started_ranks(tmp_path, tmp_path / "stuck.py", [], 2)
    wait_until(lambda: all((tmp_path / f"stdout-{rank}").read_text() for rank in (0, 1)))
    assert ended_together(running, time.monotonic()) is None
    for rank in (0, 1):
        said = (tmp_path / f"stderr-{rank}").read_text()
        assert "in stuck\n" in said
        assert "in stuck_in_a_thread\n" in said


def asking_for(port: int) -> socket.socket:
    """A socket to which Linux may give this port only."""
    asking = socket.socket()
    asking.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, struct.pack("I", port << 16 | port))
    return asking


@pytest.mark.skipif(LINUX < (6, 3), reason="this Linux has no IP_LOCAL_PORT_RANGE")
def test_a_held_port_is_given_to_nobody_but_the_server_that_is_told_it() -> None:
    with held_port() as held:
        port = held.getsockname()[1]
        with asking_for(port) as asking, pytest.raises(OSError, match="already in use"):
            asking.bind(("127.0.0.1", 0))
        with held_port() as server, asking_for(port) as asking:
            server.listen()
            with pytest.raises(OSError, match="assign requested address"):
                asking.connect(server.getsockname())
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        assert store.port == port
        del store
    with asking_for(port) as asking:
        asking.bind(("127.0.0.1", 0))


def test_ranks_are_forked_from_a_process_of_one_thread() -> None:
    assert len(threads_of_the_server()) == 1
