"""Writing a file from front to back in chunks, of which one is filled while others are being written.

A large file bypasses the page cache: data that is written once and read much later would evict other data
from memory, and filling the cache costs a copy that can be slower than the disk.
"""

from __future__ import annotations

import contextlib
import mmap
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from zero.files.storage import PAGE, Storage

CHUNK = 1 << 20  # bytes written at once
_WRITERS = 7  # chunks being written while one is filled, so that slow filling does not idle the disk
_HUGE = 1 << 21  # bytes of a huge page
_ADVICE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)


class AppendedFile:
    """A new file of `size` bytes. Methods raise OSError, possibly for data that was appended earlier.

    threads: whether the program can start some; without them one chunk after another is filled and written.
    """

    def __init__(self, storage: Storage, path: Path, size: int, threads: bool = True) -> None:
        self._size = size
        self._large = size > CHUNK
        self._file = storage.create(path, size, direct=self._large)
        self._writers = ThreadPoolExecutor(_WRITERS) if self._large and threads else None
        count = 1 if self._writers is None else 1 + _WRITERS
        memory = empty_aligned((1 + _WRITERS if self._large else 1) * CHUNK)
        self._chunks = np.split(memory, count)
        self._pending: list[Future[None] | None] = [None] * count
        self._current = 0  # index of the chunk being filled
        self._filled = 0  # bytes of it
        self._position = 0  # of its first byte in the file

    def append(self, data: memoryview) -> None:
        """Append a copy of `data`, which may change after this returns."""
        while data.nbytes:
            chunk = self._chunks[self._current]
            count = min(data.nbytes, len(chunk) - self._filled)
            part = np.frombuffer(data[:count], np.uint8)
            np.copyto(chunk[self._filled : self._filled + count], part)  # releases the GIL
            data, self._filled = data[count:], self._filled + count
            if self._filled == len(chunk):
                self._send()

    def finish(self) -> None:
        """Return once all bytes are on the disk."""
        if self._large:
            end = -(-self._filled // PAGE) * PAGE
            self._chunks[self._current][self._filled : end] = 0
            self._filled = end
        self._send()
        for index in range(len(self._chunks)):
            self._wait(index)
        if self._large:
            self._file.truncate(self._size)
        self._file.sync()

    def close(self) -> None:
        """Close the file, finished or not."""
        if self._writers is not None:
            self._writers.shutdown()
        self._file.close()

    def _send(self) -> None:
        """Write the current chunk, or submit it for writing and begin the next one when it is free."""
        data = self._chunks[self._current][: self._filled].data
        if self._writers is None:
            self._file.write(self._position, [data])
        else:
            self._pending[self._current] = self._writers.submit(self._file.write, self._position, [data])
            self._current = (self._current + 1) % len(self._chunks)
            self._wait(self._current)
        self._position += self._filled
        self._filled = 0

    def _wait(self, index: int) -> None:
        pending, self._pending[index] = self._pending[index], None
        if pending is not None:
            pending.result()


def empty_aligned(size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """`size` bytes of memory that begin on a page.

    Large memory uses huge pages if there are any, as touching thousands of small ones for the first time
    takes milliseconds.
    """
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= _HUGE and _ADVICE is not None:
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(_ADVICE)
    return np.frombuffer(memory, np.uint8)
