"""A file system in memory that knows what is on the disk and what is only in the cache.

Every change is one operation in `log`; doing the first n of them again makes the moment after the n-th. What
has not been synced may be there after a crash or not: names of a directory and sectors of a file, each for
itself.
"""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from zero.files.storage import File, Lock, Storage

SECTOR = 512
Tree = dict[str, Any]  # names to bytes or trees
Operation = tuple[Any, ...]
Fixed = Literal["none", "initial", "all"]
Fault = Callable[[int, Operation], None]  # (operations tried before, operation): may raise OSError


@dataclass
class FileNode:
    """A file: its bytes on the disk, and the writes since."""

    synced: bytes = b""
    pending: list[tuple[int, bytes]] = field(default_factory=list)

    def now(self) -> bytes:
        return self.after(lambda: True)

    def after(self, survives: Callable[[], bool]) -> bytes:
        """Its bytes after a crash, where each sector written since the sync may or may not be there."""
        data = bytearray(self.synced)
        for offset, written in self.pending:
            for begin in range(0, len(written), SECTOR):
                part = written[begin : begin + SECTOR]
                if survives():
                    end = offset + begin + len(part)
                    data.extend(bytes(max(0, end - len(data))))
                    data[offset + begin : end] = part
        return bytes(data)


@dataclass
class DirectoryNode:
    """A directory: its names on the disk, and the changes since: ("add", name, node), ("drop", name),
    ("move", old, new). fixed: it cannot be renamed."""

    synced: dict[str, Any] = field(default_factory=dict)
    pending: list[tuple[Any, ...]] = field(default_factory=list)
    fixed: bool = False

    def now(self) -> dict[str, Any]:
        return self.after(lambda: True)

    def after(self, survives: Callable[[], bool]) -> dict[str, Any]:
        names = dict(self.synced)
        for change in self.pending:
            if not survives():
                continue
            kind, name, *rest = change
            if kind == "add":
                names[name] = rest[0]
            elif kind == "drop":
                names.pop(name, None)
            elif name in names:
                names[rest[0]] = names.pop(name)
        return names


class MemoryFile(File):
    def __init__(self, storage: MemoryStorage, path: Path) -> None:
        super().__init__(path, -1)
        self._storage = storage
        self._node = storage.node(path)
        assert isinstance(self._node, FileNode)

    def size(self) -> int:
        return len(self._node.now())

    def write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        self._storage.do("write", str(self.path), offset, b"".join(bytes(b) for b in buffers))

    def read(self, offset: int, into: memoryview) -> int:
        data = self._node.now()[offset : offset + into.nbytes]
        into[: len(data)] = data
        return len(data)

    def sync(self) -> None:
        self._storage.do("sync", str(self.path))

    def close(self) -> None:
        return


class MemoryStorage(Storage):
    """fault: called before every operation. fixed: directories that cannot be renamed: none; those that are
    there already, as those from an overlay's lower layer; all. log: (name of the thread, operation)."""

    def __init__(
        self, initial: Tree | None = None, fault: Fault | None = None, fixed: Fixed = "none"
    ) -> None:
        self.root = _directory(initial or {}, fixed != "none")
        self.fixed = fixed
        self.log: list[tuple[str, Operation]] = []
        self.fault = fault
        self._attempts = 0
        self._lock = threading.RLock()

    # -- what the code under test calls ------------------------------------------------------------

    def create(self, path: Path, size: int, direct: bool = False) -> File:
        assert not direct, "the saves in memory are small"
        self.do("create", str(path), size)
        return MemoryFile(self, path)

    def open(self, path: Path, direct: bool = False) -> File:
        if not isinstance(self.node(path), FileNode):
            raise IsADirectoryError(errno.EISDIR, "is a directory", str(path))
        return MemoryFile(self, path)

    def make_directory(self, path: Path) -> None:
        self.do("make", str(path))

    def rename(self, old: Path, new: Path) -> None:
        self.do("rename", str(old), str(new))

    def sync_directory(self, path: Path) -> None:
        self.do("sync names", str(path))

    def names(self, path: Path) -> list[str]:
        node = self.node(path)
        assert isinstance(node, DirectoryNode)
        return sorted(node.now())

    def exists(self, path: Path) -> bool:
        try:
            self.node(path)
        except FileNotFoundError:
            return False
        return True

    def is_directory(self, path: Path) -> bool:
        return self.exists(path) and isinstance(self.node(path), DirectoryNode)

    def remove(self, path: Path) -> None:
        if self.is_directory(path):
            for name in self.names(path):
                self.remove(path / name)
        if self.exists(path):
            self.do("remove", str(path))

    def lock(self, path: Path, wait: bool = False) -> Lock | None:
        return MemoryLock()

    # -- one operation at a time ----------------------------------------------------------------------

    def do(self, *operation: Any) -> None:
        """Apply and log one operation."""
        with self._lock:
            self._attempts += 1
            if self.fault is not None:
                self.fault(self._attempts - 1, operation)
            self._apply(operation)
            self.log.append((threading.current_thread().name, operation))

    def _apply(self, operation: Operation) -> None:
        kind, path, *rest = operation
        parent, name = self._parent(Path(path)), Path(path).name
        if kind in ("create", "make"):
            if name in parent.now():
                raise FileExistsError(errno.EEXIST, "exists", path)
            fixed = self.fixed == "all"
            node = DirectoryNode(fixed=fixed) if kind == "make" else FileNode(pending=[(0, bytes(rest[0]))])
            parent.pending.append(("add", name, node))
        elif kind == "write":
            self._file(path).pending.append((rest[0], rest[1]))
        elif kind == "sync":
            node = self._file(path)
            node.synced, node.pending = node.now(), []
        elif kind == "sync names":
            directory = self.node(Path(path))
            assert isinstance(directory, DirectoryNode)
            directory.synced, directory.pending = directory.now(), []
        elif kind == "rename":
            self._rename(parent, Path(path), Path(rest[0]))
        elif kind == "remove":
            parent.pending.append(("drop", name))

    def _rename(self, parent: DirectoryNode, old: Path, new: Path) -> None:
        there, node = self._parent(new).now().get(new.name), self.node(old)
        if isinstance(there, DirectoryNode) and there.now():
            raise OSError(errno.ENOTEMPTY, "not empty", str(new))
        if isinstance(node, DirectoryNode) and node.fixed:
            raise OSError(errno.EXDEV, "invalid cross-device link", str(old))
        if old.parent == new.parent:
            parent.pending.append(("move", old.name, new.name))
        else:
            assert isinstance(node, FileNode)
            parent.pending.append(("drop", old.name))
            self._parent(new).pending.append(("add", new.name, node))

    def node(self, path: Path) -> Any:
        """The file or directory at a path; raises FileNotFoundError."""
        node: Any = self.root
        for part in path.parts[1:]:
            names = node.now() if isinstance(node, DirectoryNode) else {}
            if part not in names:
                raise FileNotFoundError(errno.ENOENT, "no such file or directory", str(path))
            node = names[part]
        return node

    def _file(self, path: str) -> FileNode:
        node = self.node(Path(path))
        assert isinstance(node, FileNode)
        return node

    def _parent(self, path: Path) -> DirectoryNode:
        node = self.node(path.parent)
        if not isinstance(node, DirectoryNode):
            raise NotADirectoryError(errno.ENOTDIR, "not a directory", str(path.parent))
        return node

    # -- crashes ---------------------------------------------------------------------------------------

    def tree(self, survives: Callable[[], bool] = lambda: True) -> Tree:
        """What is there after a crash. survives: asked for every change that has not been synced."""
        return _tree(self.root, survives)

    def crashes(self, generator: random.Random, mixed: int) -> Iterable[Tree]:
        """Everything there, nothing that was not synced, and `mixed` mixtures."""
        yield self.tree()
        yield self.tree(lambda: False)
        for _ in range(mixed):
            share = generator.random()
            yield self.tree(lambda: generator.random() < share)  # noqa: B023


class MemoryLock(Lock):
    def __init__(self) -> None:
        super().__init__(-1)

    def release(self) -> None:
        return


def _directory(tree: Tree, fixed: bool) -> DirectoryNode:
    names = {n: _directory(v, fixed) if isinstance(v, dict) else FileNode(v) for n, v in tree.items()}
    return DirectoryNode(names, fixed=fixed)


def _tree(node: Any, survives: Callable[[], bool]) -> Any:
    if isinstance(node, FileNode):
        return node.after(survives)
    return {name: _tree(child, survives) for name, child in node.after(survives).items()}
