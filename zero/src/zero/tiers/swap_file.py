"""A rank's file for state that is kept on disk while the job runs.

The file has no name: it is unlinked as soon as it is open, so a job leaves nothing behind, however it ends.
Space is allocated when it is requested, before training, so that a full disk cannot stop a step. Records are
read and written with O_DIRECT, in blocks that several threads move concurrently. Parameters go through the
page cache, by a second descriptor, which keeps what there is memory for; so do slices of a record, which only
checkpoints and inspection need.
"""

from __future__ import annotations

import bisect
import errno
import mmap
import os
import tempfile
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from accelz import HOST, Memory
from zero.errors import OffloadError
from zero.ranges import in_range
from zero.tiers.values import Stored, bytes_of

PAGE = 4096
TRANSFER_BLOCK = 4 << 20  # bytes that one thread moves at a time
_PREFIX = ".zero-swap-"
_STALE = 60.0  # seconds after which a file that still has a name is abandoned
THREADS = 8  # concurrent transfers; a disk needs several to be busy


class SwapFile:
    """A rank's unnamed file.

    folder: where the file is made, with mode 0600; raises OffloadError if that is not possible. bytes_read,
    bytes_written: moved so far with O_DIRECT. busy: nanoseconds in which any of them were on their way, "from
    disk" and "to disk". past_cache: whether the file system takes that in our pages.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bytes_read = 0
        self.bytes_written = 0
        self.busy = Counter[str]()
        self._moving = Counter[str]()  # blocks, by direction
        self._since: dict[str, int] = {}
        self._lock = threading.Lock()
        self._end = 0
        self._reserved = 0
        self._places: list[int] = []  # of allocations, ascending
        self._changes: list[int] = []  # number of writes to each
        self._direct, self._cached = _open(folder)
        self.past_cache = self._direct != self._cached
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="zero-swap")
        self._close = weakref.finalize(self, _close, self._threads, {self._direct, self._cached})

    def reserve(self, nbytes: int) -> None:
        """Reserve `nbytes` more than so far. Raises OffloadError on a full disk."""
        try:
            os.posix_fallocate(self._cached, self._reserved, nbytes)
        except OSError as error:
            raise OffloadError(
                f"no space for {nbytes:,} more bytes of state beside {self._reserved:,} in {self.folder}: "
                f"{error.strerror}. Free space there, choose another Offload(path=...), or use more ranks"
            ) from error
        self._reserved += nbytes

    def allocate(self, nbytes: int) -> int:
        """Allocate `nbytes` from a page boundary on; return the offset.

        Raises OffloadError on a full disk, except for space that was reserved.
        """
        place, size = self._end, -(-nbytes // PAGE) * PAGE
        if place + size > self._reserved:
            self.reserve(place + size - self._reserved)
        self._end += size
        self._places.append(place)
        self._changes.append(0)
        return place

    def changes(self, place: int) -> int:
        """Return the number of writes begun so far to the allocation that contains `place`."""
        return self._changes[bisect.bisect_right(self._places, place) - 1]

    @in_range("read", "from disk")
    def read(self, place: int, buffer: memoryview) -> Transfer:
        """Begin to fill `buffer`, page-aligned and of whole pages, from `place`."""
        self.bytes_read += buffer.nbytes
        return self._move(os.preadv, self._direct, place, buffer)

    @in_range("read", "from disk")
    def read_cached(self, place: int, buffer: memoryview) -> Transfer:
        """Begin to fill `buffer` from any place, through the page cache."""
        return self._move(os.preadv, self._cached, place, buffer)

    @in_range("write", "to disk")
    def write(self, place: int, buffer: memoryview) -> Transfer:
        """Begin to write `buffer`, page-aligned and of whole pages, to `place`.

        It must not change until it has been written.
        """
        self.bytes_written += buffer.nbytes
        self._count_change(place)
        return self._move(os.pwritev, self._direct, place, buffer)

    def read_slice(self, place: int, buffer: memoryview) -> None:
        """Fill `buffer` from any place, through the page cache."""
        self._guarded(os.preadv, self._cached, place, buffer)

    def write_slice(self, place: int, buffer: memoryview) -> None:
        """Write `buffer` to any place, through the page cache."""
        self._count_change(place)
        self._guarded(os.pwritev, self._cached, place, buffer)

    def close(self) -> None:
        """Give back the disk space; dropping the object does so, too."""
        self._threads.shutdown()
        self._close()

    def _count_change(self, place: int) -> None:
        self._changes[bisect.bisect_right(self._places, place) - 1] += 1

    def _move(self, call: Callable[..., int], descriptor: int, place: int, buffer: memoryview) -> Transfer:
        begins = range(0, buffer.nbytes, TRANSFER_BLOCK)
        blocks = [(place + begin, buffer[begin : begin + TRANSFER_BLOCK]) for begin in begins]
        return Transfer([self._threads.submit(self._timed, call, descriptor, *block) for block in blocks])

    def _timed(self, call: Callable[..., int], descriptor: int, place: int, buffer: memoryview) -> None:
        where = "from disk" if call is os.preadv else "to disk"
        with self._lock:
            if not self._moving[where]:
                self._since[where] = time.monotonic_ns()
            self._moving[where] += 1
        try:
            self._guarded(call, descriptor, place, buffer)
        finally:
            with self._lock:
                self._moving[where] -= 1
                if not self._moving[where] and descriptor == self._direct:
                    self.busy[where] += time.monotonic_ns() - self._since[where]

    def _guarded(self, call: Callable[..., int], descriptor: int, place: int, buffer: memoryview) -> None:
        done = 0
        try:
            while done < buffer.nbytes:
                moved = call(descriptor, [buffer[done:]], place + done)
                if not moved:
                    raise OSError(0, "the file ended early")
                done += moved
        except OSError as error:
            what = "read from" if call is os.preadv else "written to"
            raise OffloadError(
                f"{buffer.nbytes:,} bytes of state could not be {what} the disk of {self.folder}: "
                f"{error.strerror}. Load a checkpoint once the disk works again"
            ) from error


class Transfer:
    """A read or write under way."""

    def __init__(self, blocks: list[Future[None]]) -> None:
        self._blocks = blocks

    def drain(self) -> None:
        """Wait until no part of it is under way any more, moved or not."""
        wait(self._blocks)

    @in_range("wait", "for disk")
    def wait(self) -> None:
        """Wait until all of it has been moved; raises OffloadError if a part could not be."""
        self.drain()  # every block: none may still be moving when the buffer is used again
        for block in self._blocks:
            block.result()
        self._blocks = []


class Section(Stored):
    """Values in a swap file. place: offset of the first byte."""

    def __init__(self, file: SwapFile, place: int, numel: int, dtype: torch.dtype) -> None:
        super().__init__(numel, dtype)
        self.file = file
        self.place = place

    def read_into(self, out: Tensor) -> None:
        self.file.read_slice(self.place, bytes_of(out))

    def write(self, values: Tensor) -> None:
        host = values.detach().to(HOST, self.dtype).contiguous()
        self.file.write_slice(self.place, bytes_of(host))

    @property
    def changes(self) -> int:
        """Number of writes begun so far to the allocation that this is part of."""
        return self.file.changes(self.place)

    def part(self, begin: int, end: int) -> Section:
        return Section(self.file, self.place + begin * self.dtype.itemsize, end - begin, self.dtype)


def section_bytes(numel: int, dtype: torch.dtype) -> int:
    """Return a section's bytes on disk, in whole pages."""
    return -(-numel * dtype.itemsize // PAGE) * PAGE


def page_aligned_part(buffer: Tensor) -> Tensor:
    """The part of a host buffer (uint8) that begins with a page; allocate PAGE bytes more than needed."""
    return buffer[-buffer.data_ptr() % PAGE :]


def whole_pages(memory: Memory, nbytes: int) -> Tensor:
    """Return `nbytes` of host memory that begin on a page boundary, (nbytes,) uint8.

    An exact allocation is tried first: page-locked memory begins on one anyway, and an allocator that rounds
    sizes up could take twice as much for one page more.
    """
    exact = memory.empty_host((nbytes,), torch.uint8)
    if exact.data_ptr() % PAGE == 0:
        return exact
    del exact
    return page_aligned_part(memory.empty_host((nbytes + PAGE,), torch.uint8))[:nbytes]


def _close(threads: ThreadPoolExecutor, descriptors: set[int]) -> None:
    """Give back threads and descriptors.

    No transfer is under way, as it would keep the file alive. The garbage collector may call this at any
    point, even while a thread is being started, where waiting for another thread to end would deadlock.
    """
    threads.shutdown(wait=False)
    for descriptor in descriptors:
        os.close(descriptor)


def _open(folder: Path) -> tuple[int, int]:
    """Open a file without a name, both for O_DIRECT and through the page cache."""
    try:
        _sweep(folder)
        cached, name = tempfile.mkstemp(prefix=_PREFIX, dir=folder)  # mode 0600
    except OSError as error:
        raise OffloadError(
            f"Offload(path={str(folder)!r}): no file can be created there: {error.strerror}. It must be a "
            "directory that this user may write to, on a local disk"
        ) from error
    try:
        return _open_direct(name, cached), cached
    finally:
        os.unlink(name)


def _sweep(folder: Path) -> None:
    """Remove the file of a job that was killed between making its file and unlinking it."""
    for path in folder.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another rank may be sweeping, or it is another user's
            found = path.stat()
            if found.st_size == 0 and time.time() - found.st_mtime > _STALE:
                path.unlink()


def _open_direct(name: str, cached: int) -> int:
    try:
        direct = os.open(name, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
        if _takes_pages(direct):
            return direct
        os.close(direct)
    except (AttributeError, OSError):
        pass
    return cached  # where the file system does not take O_DIRECT in our pages


def _takes_pages(direct: int) -> bool:
    """Return whether O_DIRECT works in pages of PAGE bytes.

    Some file systems open any file so, and then need larger pages.
    """
    try:
        with mmap.mmap(-1, PAGE) as page:
            os.pwrite(direct, page, 0)
        os.ftruncate(direct, 0)
    except OSError as error:
        return error.errno != errno.EINVAL  # a full disk is reported when its space is needed
    return True
