"""Collectives staged through the host: when the result reaches the device."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed as dist

from accelz.host_staged import StagedWork


class Gate(dist.Work):
    """A collective that is complete when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.open = threading.Event()
        self.waiting = threading.Semaphore(0)

    def wait(self, timeout: Any = None) -> bool:
        self.waiting.release()
        return self.open.wait(10)


class SlowTarget(torch.Tensor):
    """Says how often it is copied to, and takes its time."""

    copies = 0

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        type(self).copies += 1
        threading.Event().wait(0.1)
        with torch._C.DisableTorchFunctionSubclass():
            return super().copy_(source, non_blocking)


def test_a_second_thread_returns_when_the_result_is_there_and_copies_nothing() -> None:
    gate, target = Gate(), torch.zeros(3).as_subclass(SlowTarget)
    work = StagedWork(gate, torch.ones(3), target)
    seen: list[float] = []

    def wait_and_look() -> None:
        work.wait()
        seen.append(float(target.as_subclass(torch.Tensor).sum()))

    threads = [threading.Thread(target=wait_and_look) for _ in range(2)]
    for thread in threads:
        thread.start()
    gate.waiting.acquire()
    gate.open.set()
    for thread in threads:
        thread.join()
    assert seen == [3.0, 3.0]
    assert SlowTarget.copies == 1
