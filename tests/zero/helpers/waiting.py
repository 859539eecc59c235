"""Waiting for what other processes do, and their end."""

from __future__ import annotations

import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess

LIMIT = 60.0


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def end(processes: list[BaseProcess]) -> None:
    for process in processes:
        process.kill()
        process.join()
