"""A file system that counts what is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from zero.files.storage import File, Storage


class CountingStorage(Storage):
    """bytes: read from files of safetensors. on_read: called before every read of one."""

    def __init__(self) -> None:
        self.bytes = 0
        self.on_read: Callable[[], None] = lambda: None

    def open(self, path: Path, direct: bool = False) -> File:
        file = super().open(path, direct)
        if path.suffix == ".safetensors":
            read = file.read

            def counted(offset: int, into: memoryview) -> int:
                self.on_read()
                self.bytes += into.nbytes
                return read(offset, into)

            file.read = counted  # type: ignore[method-assign]
        return file
