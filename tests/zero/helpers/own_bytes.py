"""An accelerator whose ranks share no memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from accelz import Accelerator, StorageSwap
from accelz.gloo import GlooLanes


@contextmanager
def bytes_of_its_own(accelerator: Accelerator) -> Iterator[None]:
    """Where ranks share memory a release drops nothing, and reading behind it would go unnoticed. Ranks on
    devices do not."""
    if accelerator.device.type != "cpu":
        yield
        return
    before = accelerator.collectives, accelerator.flat_buffers
    accelerator.collectives, accelerator.flat_buffers = GlooLanes(), StorageSwap(accelerator.device)
    try:
        yield
    finally:
        accelerator.collectives, accelerator.flat_buffers = before
