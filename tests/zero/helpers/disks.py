"""Disks that fail."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def broken_disk(after: int) -> Iterator[None]:
    """Reads and writes of the swap file fail, `after` more of them."""
    count = 0
    sound = os.preadv

    def read(descriptor: int, buffers: Any, place: int) -> int:
        nonlocal count
        count += 1
        if count > after:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return sound(descriptor, buffers, place)

    os.preadv = read
    try:
        yield
    finally:
        os.preadv = sound
