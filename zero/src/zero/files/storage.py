"""The thin layer that all input and output of checkpoints goes through. Tests replace it to inject faults."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import resource
import shutil
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

PAGE = 4096  # bytes; direct writes are aligned to it
_MOST_BUFFERS = os.sysconf("SC_IOV_MAX")
_DIRECT = getattr(os, "O_DIRECT", 0)
_advise = getattr(os, "posix_fadvise", None)
_fallocate: Any = getattr(os, "posix_fallocate", lambda file, start, size: os.truncate(file, size))
LOCK = ".zero-lock"  # is never removed
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Let an OSError in the block name the file, as the system's errors about descriptors do not."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


class File:
    """An open file, usable from any thread. Every method raises OSError with the file's name.

    around: a second descriptor of the file, whose reads bypass the page cache.
    """

    def __init__(self, path: Path, descriptor: int, around: int | None = None) -> None:
        self.path = path
        self._descriptor = descriptor
        self._around = around

    def size(self) -> int:
        """The file's size in bytes."""
        with _naming(self.path):
            return os.fstat(self._descriptor).st_size

    def write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Write byte buffers one after another from `offset` on, and start their write-back at once."""
        pending = [b for b in buffers if b.nbytes]
        position = offset
        with _naming(self.path):
            while pending:
                done = self._write_some(pending[:_MOST_BUFFERS], position)
                position += done
                pending = _rest(pending, done)
            if _advise is not None:  # starts the write-back; without it the disk would idle until the fsync
                _advise(self._descriptor, offset, position - offset, os.POSIX_FADV_DONTNEED)

    def read(self, offset: int, into: memoryview) -> int:
        """Fill `into` from `offset` on. Returns the bytes read, fewer only at the end of the file."""
        done = 0
        with _naming(self.path):
            while done < into.nbytes:
                count = os.preadv(self._descriptor, [into[done:]], offset + done)
                if not count:
                    break
                done += count
        return done

    def read_bytes(self, offset: int, count: int) -> bytes:
        """Up to `count` bytes from `offset` on, fewer only at the end of the file."""
        buffer = bytearray(count)
        return bytes(buffer[: self.read(offset, memoryview(buffer))])

    def read_around(self, offset: int, count: int, pages: memoryview) -> memoryview:
        """Read `count` bytes from `offset` on, bypassing the page cache if the file was opened for that.

        pages: page-aligned memory, at least two pages larger than the bytes need. Returns the part of it that
        holds the bytes, fewer only at the end of the file.
        """
        shift = offset % PAGE
        end = -(-(shift + count) // PAGE) * PAGE
        done = self._read_pages(offset - shift, pages[:end])
        return pages[shift : max(shift, min(shift + count, done))]

    def truncate(self, size: int) -> None:
        """Cut the file to `size` bytes."""
        with _naming(self.path):
            os.ftruncate(self._descriptor, size)

    def sync(self) -> None:
        """Return once the file's bytes are on the disk."""
        with _naming(self.path):
            os.fsync(self._descriptor)

    def close(self) -> None:
        with _naming(self.path):
            os.close(self._descriptor)
            if self._around is not None:
                os.close(self._around)

    def _read_pages(self, offset: int, pages: memoryview) -> int:
        """Fill whole pages. Returns the bytes read, fewer only at the end of the file."""
        done = 0
        while self._around is not None and done < pages.nbytes and not done % PAGE:
            try:
                with _naming(self.path):
                    count = os.preadv(self._around, [pages[done:]], offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                break  # it requires a larger alignment
            if not count:
                return done
            done += count
        return done + self.read(offset + done, pages[done:])

    def _write_some(self, buffers: Sequence[memoryview], offset: int) -> int:
        try:
            done = self._pwritev(buffers, offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._leave_direct()  # another write may have done so already, so retry in any case
            done = self._pwritev(buffers, offset)
        if done % PAGE:  # cut short: what is left is not aligned
            self._leave_direct()
        return done

    def _pwritev(self, buffers: Sequence[memoryview], offset: int) -> int:
        done = os.pwritev(self._descriptor, buffers, offset)
        if not done and any(buffer.nbytes for buffer in buffers):
            raise OSError(errno.EIO, f"nothing was written at byte {offset}")
        return done

    def _leave_direct(self) -> None:
        """Write through the page cache from now on."""
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~_DIRECT)


class Storage:
    """The file system. Every method raises OSError with the file's name."""

    def create(self, path: Path, size: int, direct: bool = False) -> File:
        """Create a file of `size` bytes, with its space reserved. The path must not exist.

        direct: bypass the page cache in writing where the file system can; offsets, lengths and buffers then
        have to be multiples of PAGE bytes.
        """
        file = File(path, _create(path, direct))
        try:
            if size:
                with _naming(path):
                    _allocate(file._descriptor, size)
        except BaseException:
            file.close()
            raise
        return file

    def open(self, path: Path, direct: bool = False) -> File:
        """Open a regular file for reading. direct: let read_around() bypass the page cache where possible.

        Anything else that a name may lead to is refused: a pipe would block, and a device may never end.
        """
        descriptor = _open_regular(path)
        around = None
        if direct and _DIRECT:
            with contextlib.suppress(OSError):  # a file system in memory, for one, has no direct access
                around = _open_regular(path, _DIRECT)
        return File(path, descriptor, around)

    def reopen(self, path: Path) -> File:
        """Open an existing file for writing, through the page cache."""
        return File(path, os.open(path, os.O_WRONLY | os.O_CLOEXEC))

    def make_directory(self, path: Path) -> None:
        """Create a directory. The path must not exist, and its parent must."""
        path.mkdir()

    def make_directories(self, path: Path) -> list[Path]:
        """Create a directory and those above it. Returns those that were not there, the topmost first."""
        missing = [each for each in (path, *path.parents) if not self.exists(each)][::-1]
        for each in missing:
            self.make_directory(each)
        return missing

    def rename(self, old: Path, new: Path) -> None:
        """Rename atomically. An empty directory or a file at `new` is replaced.

        Only a file may move to another directory; a directory may refuse, see `in_place.CANNOT_RENAME`.
        """
        old.rename(new)

    def exchange(self, first: Path, second: Path) -> bool:
        """Swap two directories atomically. Returns False if the system cannot."""
        exchange = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
        if exchange is None:
            return False
        names = _AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second)
        return bool(exchange(*names, _RENAME_EXCHANGE) == 0)

    def link(self, old: Path, new: Path) -> None:
        """Give a file or a link a second name, or copy it where the file system has no hard links."""
        try:
            os.link(old, new, follow_symlinks=False)
        except OSError:  # a file system without hard links
            shutil.copy2(old, new, follow_symlinks=False)

    def sync_directory(self, path: Path) -> None:
        """Return once the names in a directory are on the disk."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with _naming(path):
                os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def names(self, path: Path) -> list[str]:
        """The names in a directory, sorted."""
        return sorted(os.listdir(path))

    def exists(self, path: Path) -> bool:
        return path.exists()

    def is_directory(self, path: Path) -> bool:
        return path.is_dir()

    def is_link(self, path: Path) -> bool:
        return path.is_symlink()

    def remove(self, path: Path) -> None:
        """Remove a file, or a directory with all it holds. Entries that vanish meanwhile are no error."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, onerror=_unless_gone)
            return
        with contextlib.suppress(FileNotFoundError):
            path.unlink()

    def lock(self, path: Path, wait: bool = False) -> Lock | None:
        """Claim a directory until release() or the end of this process.

        Returns None if it is claimed already, or, with `wait`, waits until it is free. NFS cannot lock
        directories, so a hidden file in the directory is locked there. On a file system without locks every
        claim succeeds.
        """
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        claimed = _claim(descriptor, wait)
        if claimed is None:
            os.close(descriptor)
            descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            claimed = _claim(descriptor, wait)
        if claimed is not False:
            return Lock(descriptor)
        os.close(descriptor)
        return None


class Lock:
    """A claimed directory. It may be renamed while it is claimed."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def release(self) -> None:
        with contextlib.suppress(OSError):  # explicitly: a forked process may hold the descriptor too
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        with contextlib.suppress(OSError):  # what was done under the lock is done
            os.close(self._descriptor)


DISK = Storage()


def read_whole(storage: Storage, path: Path, most: int) -> bytes:
    """Read all bytes of a small file. Raises OSError if it has more than `most`, before reading any."""
    with contextlib.closing(storage.open(path)) as file:
        if (size := file.size()) > most:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, and at most {most:,} are read", str(path))
        return file.read_bytes(0, size)


def write_whole(storage: Storage, path: Path, data: bytes) -> None:
    """Create a small file that is on the disk when this returns."""
    with contextlib.closing(storage.create(path, len(data))) as file:
        file.write(0, [memoryview(data)])
        file.sync()


def _create(path: Path, direct: bool) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    if direct:
        try:
            return _open(path, flags | _DIRECT)
        except OSError as error:  # a file system in memory, for one, has no direct access
            if error.errno != errno.EINVAL:
                raise
            path.unlink(missing_ok=True)
    return _open(path, flags)


def allow_more_files() -> None:
    """Raise this process's limit of open files to the maximum: there is a file for each rank that saved."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _open(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
    allow_more_files()
    return os.open(path, flags, 0o666)


def _open_regular(path: Path, flags: int = 0) -> int:
    """Open a file for reading, and only if it is a regular one."""
    _check_regular(path, os.stat(path))  # opening some devices has effects of its own
    descriptor = _open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
    try:
        _check_regular(path, os.fstat(descriptor))  # it may have been replaced meanwhile
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_regular(path: Path, status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is a pipe, a device or a socket, not a file", str(path))


def _allocate(descriptor: int, size: int) -> None:
    """Reserve a file's space.

    Where the system cannot, the C library writes into every block of the file. Files that are open for direct
    access refuse that, so they only get their size.
    """
    try:
        _fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        os.truncate(descriptor, size)


def _claim(descriptor: int, wait: bool) -> bool | None:
    """Try to lock an open file; returns whether that succeeded, None where locks do not exist."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _rest(buffers: list[memoryview], done: int) -> list[memoryview]:
    """What is left of `buffers` after their first `done` bytes."""
    for index, buffer in enumerate(buffers):
        if done < buffer.nbytes:
            return [buffer[done:], *buffers[index + 1 :]]
        done -= buffer.nbytes
    return []


def _unless_gone(function: object, path: str, caught: tuple[type, BaseException, object]) -> None:
    if not isinstance(caught[1], FileNotFoundError):
        raise caught[1]
