"""Notes which method of the backend is running, so that it is known even if the method never returns.

The guard in `contract` notes every call. The note can be kept in memory that another process sees, so that a
process that ends a hanging one, or finds one crashed, can read what that one was doing.
"""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SIZE = 128
STACKS = ".stacks"
FRAME = re.compile(r'  File "(.+)", line (\d+) in (.+)')
Note = ctypes.c_char * SIZE
_note: Any = Note()
_stacks: Any = None


def keep_in(note: Any) -> None:
    """Note calls in `note` from now on: a `Note`, such as a multiprocessing RawArray of c_char."""
    global _note
    _note = note


def keep_in_file(path: Path) -> None:
    """Note calls in a file, which outlives this process, from now on; beside it the stacks of a crash."""
    global _stacks
    _stacks = path.with_suffix(STACKS).open("w")
    faulthandler.enable(_stacks)
    path.write_bytes(bytes(SIZE))
    with path.open("r+b") as file:
        keep_in(Note.from_buffer(mmap.mmap(file.fileno(), SIZE)))


@contextmanager
def running(method: str) -> Iterator[None]:
    """Note `method` as the running one inside the with block."""
    before = _note.value
    _note.value = method.encode()[: SIZE - 1]
    try:
        yield
    finally:
        _note.value = before


def now() -> str:
    """The method that is running in this process, or ""."""
    return str(_note.value.decode())


def read(path: Path) -> str:
    """The method noted last by the process that keeps its note in `path`, or ""."""
    return path.read_bytes().partition(b"\0")[0].decode() if path.exists() else ""


def read_stacks(path: Path) -> str:
    """The stacks of the process that kept its note in `path`, if it crashed, else ""."""
    stacks = path.with_suffix(STACKS)
    return stacks.read_text(errors="replace") if stacks.exists() else ""


def last_frame(stacks: str) -> str:
    """The Python line that a process crashed in, as "FILE:LINE, in FUNCTION", or ""."""
    crashed = stacks.partition("Current thread")[2] or stacks
    frame = FRAME.search(crashed)
    return f"{frame[1]}:{frame[2]}, in {frame[3]}" if frame else ""
