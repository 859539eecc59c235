"""A device that has less memory for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from accelz import Accelerator


@contextmanager
def capacity(accelerator: Accelerator, nbytes: int) -> Iterator[None]:
    """Of the simulated device, in the block."""
    from accelz_sim import memory

    whole = accelerator.memory.stats().capacity
    memory.set_capacity(nbytes)
    try:
        yield
    finally:
        memory.set_capacity(whole)
