"""One rank of test_cpu_namespaces.py. It answers through a pipe."""

from __future__ import annotations

import os
import socket
import time
from multiprocessing.connection import Connection

import torch
from benchmarks.hosts import NEW_NAME
from benchmarks.link import NEW_NETWORK, enter, system_call
from torch.distributed import TCPStore

import accelz
from accelz import CollectiveError
from accelz_cpu.shared_memory import SharedMemoryCollectives


def main(
    pipe: Connection, host: str, interface: str, rank: int, size: int, address: str, port: int, timeout: float
) -> None:
    """host: a network namespace, and the name of the host that this rank is on."""
    with open(f"/run/netns/{host}") as network:
        system_call("setns", network.fileno(), NEW_NETWORK)
    enter(NEW_NAME)
    socket.sethostname(host)
    os.environ |= {"GLOO_SOCKET_IFNAME": interface, "ACCELZ_DEVICE": "cpu"}
    torch.set_num_threads(1)

    calls = accelz.current().collectives
    assert isinstance(calls, SharedMemoryCollectives)
    store = TCPStore(address, port, is_master=rank == 0, wait_for_workers=False)
    group = calls.init(timeout, rank, size, store)
    whole, total = torch.zeros(size * 100_000), torch.full((100_003,), float(rank))
    calls.all_gather(whole, torch.full((100_000,), float(rank)), group)
    calls.all_reduce(total, group)
    right = torch.equal(whole, torch.arange(float(size)).repeat_interleave(100_000))
    right = right and torch.equal(total, torch.full_like(total, size * (size - 1) / 2))
    pipe.send({"transport": type(calls.transport(group)).__name__, "right": right})
    pipe.recv()  # the network between the hosts is being cut
    start = time.monotonic()
    try:
        calls.all_gather(whole, torch.ones(100_000), group)
    except CollectiveError as error:
        pipe.send({"seconds": time.monotonic() - start, "error": str(error)})
