"""Disks that fail."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any


@contextmanager
def broken(call: str, code: int, after: int = 0, mine: bool = True) -> Iterator[None]:
    """`os.call` fails on this rank if it is `mine`, `after` more of them."""
    sound, count = getattr(os, call), itertools.count()

    def fail(*arguments: Any) -> Any:
        if next(count) >= after:
            raise OSError(code, os.strerror(code))
        return sound(*arguments)

    if mine:
        setattr(os, call, fail)
    try:
        yield
    finally:
        setattr(os, call, sound)


def broken_disk(after: int) -> AbstractContextManager[None]:
    """Reads of the swap file fail, `after` more of them."""
    return broken("preadv", errno.EIO, after)
