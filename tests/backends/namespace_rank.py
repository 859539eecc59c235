"""One rank of test_cpu_namespaces.py: RANK SIZE ADDRESS PORT TIMEOUT. Prints one JSON value per line."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from torch.distributed import TCPStore

import accelz
from accelz import CollectiveError
from accelz_cpu.shared_memory import SharedMemoryCollectives


def main(rank: int, size: int, address: str, port: int, timeout: float) -> None:
    calls = accelz.current().collectives
    assert isinstance(calls, SharedMemoryCollectives)
    store = TCPStore(address, port, is_master=rank == 0, wait_for_workers=False)
    group = calls.init(timeout, rank, size, store)
    whole, total = torch.zeros(size * 100_000), torch.full((100_003,), float(rank))
    calls.all_gather(whole, torch.full((100_000,), float(rank)), group)
    calls.all_reduce(total, group)
    right = torch.equal(whole, torch.arange(float(size)).repeat_interleave(100_000))
    right = right and torch.equal(total, torch.full_like(total, size * (size - 1) / 2))
    say({"transport": type(calls.transport(group)).__name__, "right": right})
    sys.stdin.readline()  # the network between the hosts is being cut
    start = time.monotonic()
    try:
        calls.all_gather(whole, torch.ones(100_000), group)
    except CollectiveError as error:
        say({"seconds": time.monotonic() - start, "error": str(error)})


def say(value: Any) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), float(sys.argv[5]))
