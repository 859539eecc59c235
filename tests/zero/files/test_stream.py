"""Files on real file systems, with and without a way around the page cache."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from zero.files.storage import DISK, PAGE, File, Storage, read_whole, write_whole
from zero.files.stream import CHUNK, AppendedFile, empty_aligned

IN_MEMORY = Path("/dev/shm")  # a file system without direct writes


def written(storage: Storage, path: Path, pieces: Sequence[bytes], threads: bool = True) -> bytes:
    stream = AppendedFile(storage, path, sum(map(len, pieces)), threads)
    try:
        for piece in pieces:
            scratch = bytearray(piece)
            stream.append(memoryview(scratch))
            scratch[:] = bytes(len(piece))  # the caller's again
        stream.finish()
    finally:
        stream.close()
    return path.read_bytes()


@pytest.mark.parametrize(
    "size", [0, 1, PAGE, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 4 * CHUNK - PAGE, 17 * CHUNK + 12345]
)
@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("threads", [False, True])
def test_what_is_appended_is_what_is_there(tmp_path: Path, size: int, memory: bool, threads: bool) -> None:
    if memory and not IN_MEMORY.is_dir():
        pytest.skip("no file system in memory")
    generator = random.Random(size)
    data = generator.randbytes(size)
    cuts = sorted(generator.randrange(size + 1) for _ in range(20))
    pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, size], strict=True)]
    path = (IN_MEMORY if memory else tmp_path) / f"zero-test-{os.getpid()}"
    try:
        assert written(DISK, path, pieces, threads) == data
    finally:
        path.unlink()


class Reluctant(Storage):
    """Writes a little at a time, and nothing directly that is not said at once."""

    def __init__(self, most: int, refuse_direct: bool) -> None:
        self.most = most
        self.refuse_direct = refuse_direct
        self.refused = 0

    def create(self, path: Path, size: int, direct: bool = False) -> File:
        file = super().create(path, size, direct)
        storage = self

        class Slow(File):
            def _pwritev(self, buffers: Sequence[memoryview], offset: int) -> int:
                flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
                if storage.refuse_direct and flags & os.O_DIRECT:
                    storage.refused += 1
                    raise OSError(errno.EINVAL, "not aligned enough")
                return super()._pwritev([buffers[0][: storage.most]], offset)

        return Slow(path, file._descriptor)


@pytest.mark.parametrize("most", [PAGE, 3 * PAGE + 77])
@pytest.mark.parametrize("refuse_direct", [False, True])
def test_short_and_refused_writes_go_on(tmp_path: Path, most: int, refuse_direct: bool) -> None:
    storage = Reluctant(most, refuse_direct)
    data = random.Random(1).randbytes(CHUNK + 3 * PAGE + 5)
    assert written(storage, tmp_path / "file", [data]) == data
    assert storage.refused in ((1, 2) if refuse_direct else (0,))  # two writes may be under way


def test_a_write_that_moves_nothing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As file systems in user space may answer; not a loop for ever."""
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    with pytest.raises(OSError, match="nothing was written at byte 0"):
        written(DISK, tmp_path / "file", [b"some"])


def test_two_direct_writes_refused_at_once(tmp_path: Path) -> None:
    both = threading.Barrier(2, timeout=60)

    class Refusing(File):
        def _pwritev(self, buffers: Sequence[memoryview], offset: int) -> int:
            if fcntl.fcntl(self._descriptor, fcntl.F_GETFL) & os.O_DIRECT:
                both.wait()  # both have begun a direct write
                raise OSError(errno.EINVAL, "not aligned enough")
            return super()._pwritev(buffers, offset)

    path = tmp_path / "file"
    file = DISK.create(path, 2 * PAGE, direct=True)
    if not fcntl.fcntl(file._descriptor, fcntl.F_GETFL) & os.O_DIRECT:
        pytest.skip("a file system without direct writes")
    refusing = Refusing(path, file._descriptor)
    parts = [bytes([value]) * PAGE for value in (1, 2)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda i: refusing.write(i * PAGE, [memoryview(parts[i])]), range(2)))
    refusing.close()
    assert path.read_bytes() == b"".join(parts)


class Full(Storage):
    """Fails from some write on."""

    def __init__(self, writes: int) -> None:
        self.writes = writes

    def create(self, path: Path, size: int, direct: bool = False) -> File:
        file = super().create(path, size, direct)
        write = file.write

        def limited(offset: int, buffers: Sequence[memoryview]) -> None:
            self.writes -= 1
            if self.writes < 0:
                raise OSError(errno.ENOSPC, "full")
            write(offset, buffers)

        file.write = limited  # type: ignore[method-assign]
        return file


@pytest.mark.parametrize("writes", [0, 1, 3, 6])
def test_errors_of_writes_in_the_background_are_raised(tmp_path: Path, writes: int) -> None:
    data = bytes(6 * CHUNK + 1)
    with pytest.raises(OSError, match="full"):
        written(Full(writes), tmp_path / "file", [data])
    assert not _open_here(tmp_path)


def test_small_files(tmp_path: Path) -> None:
    write_whole(DISK, tmp_path / "file", b"content")
    assert read_whole(DISK, tmp_path / "file", 1 << 20) == b"content"
    with pytest.raises(FileExistsError):
        write_whole(DISK, tmp_path / "file", b"other")


@pytest.mark.parametrize("how", ["direct", "refused", "not asked for", "in memory"])
def test_reads_around_the_cache_give_any_part(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """refused: the file opens, and then wants larger pages than ours."""
    if how == "in memory" and not IN_MEMORY.is_dir():
        pytest.skip("no file system in memory")
    data = random.Random(3).randbytes(5 * PAGE + 123)
    path = (IN_MEMORY if how == "in memory" else tmp_path) / f"zero-test-{os.getpid()}"
    path.write_bytes(data)
    file = DISK.open(path, direct=how != "not asked for")
    if how == "refused":
        monkeypatch.setattr(os, "preadv", refusing(file._around))
    try:
        for offset in (0, 1, PAGE - 1, PAGE, 3 * PAGE + 77, len(data) - 1, len(data), len(data) + PAGE):
            for count in (0, 1, PAGE, PAGE + 1, 2 * PAGE, len(data)):
                pages = empty_aligned(count + 2 * PAGE).data
                assert file.read_around(offset, count, pages) == data[offset : offset + count]
    finally:
        file.close()
        path.unlink()


def refusing(descriptor: int | None) -> Callable[..., int]:
    """os.preadv, but with EINVAL for one descriptor."""
    real = os.preadv

    def preadv(asked: int, buffers: Sequence[memoryview], offset: int) -> int:
        if asked == descriptor:
            raise OSError(errno.EINVAL, "refused")
        return real(asked, buffers, offset)

    return preadv


def test_locks(tmp_path: Path) -> None:
    lock = DISK.lock(tmp_path)
    assert lock is not None
    assert DISK.lock(tmp_path) is None
    lock.release()
    again: Any = DISK.lock(tmp_path)
    again.release()


def test_remove(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").touch()
    folder = tmp_path / "folder"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "link").symlink_to(outside)
    (tmp_path / "link").symlink_to(outside)
    for path in (folder, tmp_path / "link", tmp_path / "nothing"):
        DISK.remove(path)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["file", "outside"]


def _open_here(folder: Path) -> list[str]:
    links = [f"/proc/self/fd/{n}" for n in os.listdir("/proc/self/fd")]
    return [t for t in (os.readlink(link) for link in links if os.path.islink(link)) if str(folder) in t]
