"""Which method of the backend runs now, noted where it can be read when the method never returns.

The guard in `contract` notes every call. A note may lie in memory that another process sees: whoever ends a
process that hangs, or finds one that crashed, reads there what it was doing.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SIZE = 128
Note = ctypes.c_char * SIZE
_note: Any = Note()


def keep_in(note: Any) -> None:
    """Note calls there from now on. note: a `Note`, such as a multiprocessing RawArray of c_char."""
    global _note
    _note = note


def keep_in_file(path: Path) -> None:
    """Note calls in a file from now on; it outlives this process."""
    path.write_bytes(bytes(SIZE))
    with path.open("r+b") as file:
        keep_in(Note.from_buffer(mmap.mmap(file.fileno(), SIZE)))


@contextmanager
def running(method: str) -> Iterator[None]:
    """The call of `method` is in progress inside the with block."""
    before = _note.value
    _note.value = method.encode()[: SIZE - 1]
    try:
        yield
    finally:
        _note.value = before


def now() -> str:
    """The method that runs now in this process, "" for none."""
    return str(_note.value.decode())


def read(path: Path) -> str:
    """The method that ran last in the process that keeps its note in `path`, "" for none."""
    return path.read_bytes().partition(b"\0")[0].decode() if path.exists() else ""
