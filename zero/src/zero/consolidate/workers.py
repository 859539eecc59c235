"""Handing chunks of a source to many threads, in bounded memory.

Reading, checksums, casts and writing release the interpreter lock, so threads suffice.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from zero.errors import UsageError
from zero.files.storage import PAGE
from zero.files.stream import empty_aligned
from zero.sources.source import Chunk

_SMALLEST, _LARGEST = 1 << 16, 1 << 22  # bytes of a chunk; larger ones are no faster
_ROOM = 2 * PAGE  # lets a chunk fit wherever within a page it begins


class Buffers:
    """One thread's page-aligned memory. source: for a chunk's bytes. output: for the converted bytes."""

    def __init__(self, limit: int) -> None:
        self.source = empty_aligned(limit + _ROOM).data
        self.output = empty_aligned(limit + _ROOM).data


def default_workers() -> int:
    """Two threads for each core that this process may use, since one of them waits for the disk."""
    affinity = getattr(os, "sched_getaffinity", None)
    return 2 * (len(affinity(0)) if affinity else os.cpu_count() or 1)


def chunk_bytes(memory: int, workers: int) -> int:
    """The size of a chunk with which all buffers of all workers stay within `memory` bytes.

    Raises UsageError if they cannot.
    """
    least = 2 * (_SMALLEST + _ROOM)
    if workers < 1 or memory // workers < least:
        raise UsageError(
            f"{workers} workers with {memory:,} bytes of memory: at least one worker is needed, and {least} "
            "bytes for each"
        )
    return min(_LARGEST, (memory // workers // 2 - _ROOM) // _SMALLEST * _SMALLEST)


def run(
    chunks: Iterator[Chunk], workers: int, limit: int, handle: Callable[[Chunk, Buffers], object]
) -> None:
    """Call `handle` with every chunk, on `workers` threads. Raises an error of one once all have stopped."""
    lock, stop = threading.Lock(), threading.Event()

    def work() -> None:
        buffers = Buffers(limit)
        try:
            while not stop.is_set():
                with lock:
                    chunk = next(chunks, None)
                if chunk is None:
                    return
                handle(chunk, buffers)
        except BaseException:
            stop.set()
            raise

    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(work) for _ in range(workers)]
        try:
            for future in futures:
                future.result()
        finally:  # after an interrupt, no thread may still use what the caller is about to close
            stop.set()
