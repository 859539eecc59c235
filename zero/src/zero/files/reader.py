"""Reading a checkpoint: its manifest and files, and tensors by key, every byte checked.

checkpoint = Checkpoint(find(Path("runs/a")))
entry = checkpoint.tensor("model/blocks.0.weight")
values = bytearray(entry.numel * entry.item_bytes)
checkpoint.read("model/blocks.0.weight", 0, memoryview(values))   # in memory order: see entry.stride
"""

from __future__ import annotations

import os
from bisect import bisect_right
from contextlib import AbstractContextManager, closing
from pathlib import Path
from threading import Lock
from zlib import crc32

from zero.errors import CheckpointError, CorruptCheckpointError, StateError, some
from zero.files import manifest as form
from zero.files.boundary import typed
from zero.files.manifest import (
    LARGEST_LATEST,
    LARGEST_MANIFEST,
    LARGEST_TABLE,
    LATEST,
    LONGEST_HEADER,
    MANIFEST,
    FileEntry,
    Latest,
    Manifest,
    Slice,
    TensorEntry,
    WholeTensor,
    hidden,
)
from zero.files.storage import DISK, File, Storage, read_whole


def find(path: Path, storage: Storage = DISK) -> Path:
    """The directory of the checkpoint that `path` refers to.

    path: a checkpoint, or a directory of checkpoints, of which `latest` names one. Raises CheckpointError if
    there is none, and CorruptCheckpointError if `latest` is damaged.
    """
    if storage.exists(path / MANIFEST):
        return path
    if storage.exists(path / LATEST):
        name = read_latest(path, storage).checkpoint
        return _present(path, name, storage) or _fail_to_find(path, storage, f"`latest` names {name!r}")
    path = Path(os.path.abspath(path))  # "." has no name until it is absolute; "/" never has one
    found = _present(path.parent, path.name, storage) if path.name else None
    return found or _fail_to_find(path, storage, "no checkpoint there")


def read_latest(parent: Path, storage: Storage) -> Latest:
    """Read the `latest` file of a directory of checkpoints.

    Raises CorruptCheckpointError if the file is damaged, and CheckpointError if it cannot be read or is
    another program's.
    """
    path = parent / LATEST
    with typed(path, "cannot be used", lambda: _others(parent, storage)):
        data = read_whole(storage, path, LARGEST_LATEST)
        if names_another(parent, data, storage):
            raise CheckpointError(f"{path} belongs to another program{_hint(parent, storage)}")
        return Latest.model_validate_json(form.unseal("zero-latest", data))


def _others(parent: Path, storage: Storage) -> str:
    found = _listed(complete(parent, storage))
    return f". Load a checkpoint by its own name; available: {found}"


def names_another(parent: Path, latest: bytes, storage: Storage) -> bool:
    """Whether `latest` holds nothing but the name of an entry of the directory, as DeepSpeed's does.

    If that is one of our checkpoints, somebody has edited the file.
    """
    name = latest.decode(errors="replace").strip()
    return name in storage.names(parent) and not storage.exists(parent / name / MANIFEST)


def complete(parent: Path, storage: Storage = DISK) -> list[str]:
    """The names of the published checkpoints in a directory."""
    if not storage.is_directory(parent):
        return []
    return [n for n in storage.names(parent) if n[0] != "." and storage.exists(parent / n / MANIFEST)]


class Checkpoint(AbstractContextManager["Checkpoint"]):
    """An open checkpoint directory. Files are opened, and their headers checked, when first needed.

    Methods raise CheckpointError if files are missing, and CorruptCheckpointError, which names file and
    tensor, if bytes are not those that were written. Several threads may read at once. direct: open files so
    that read_around() bypasses the page cache. bytes_read: of tensors, so far.
    """

    def __init__(self, path: Path, storage: Storage = DISK, direct: bool = False) -> None:
        self.path = path
        self._storage = storage
        self._direct = direct
        self.bytes_read = 0
        self._counting = Lock()
        self._files: dict[int, tuple[File, bytes]] = {}  # each with the checksums of its blocks
        try:
            data = read_whole(storage, path / MANIFEST, LARGEST_MANIFEST)
        except OSError as error:
            raise CheckpointError(
                f"{path} is not a checkpoint: its {MANIFEST} cannot be read: {error}"
            ) from error
        with typed(path / MANIFEST, "cannot be used"):
            self.manifest = Manifest.model_validate_json(form.unseal("zero-checkpoint", data))
        self.digest = crc32(data)
        self._starts = {key: [s.start for s in t.slices] for key, t in self.manifest.tensors.items()}

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        for file, _ in self._files.values():
            file.close()
        self._files.clear()

    def _count(self, nbytes: int) -> None:
        with self._counting:
            self.bytes_read += nbytes

    def tensor(self, key: str) -> TensorEntry | WholeTensor:
        """Shape, dtype and place of a tensor. Raises StateError for an unknown key."""
        try:
            return self.manifest.tensor(key)
        except KeyError:
            raise StateError(f"{self.path} has no tensor {key!r}") from None

    def read(self, key: str, start: int, into: memoryview) -> None:
        """Fill `into` (bytes, whole elements) with a tensor's elements from `start` on, in memory order.

        Only the blocks that hold these elements are read, and each of them is checked. A tensor that is
        stored in blocks is read with `boxes.read_region`.
        """
        self._count(into.nbytes)
        tensor = self._stored(key)
        item = tensor.item_bytes
        stop = start + into.nbytes // item
        if start < 0 or stop > tensor.numel or into.nbytes % item:
            raise StateError(
                f"{key!r} has {tensor.numel} elements of {item} bytes; {into.nbytes} bytes were requested "
                f"from element {start} on"
            )
        index, position = self._slice_at(key, start), start
        while position < stop:
            piece = tensor.slices[index]
            end = min(stop, piece.start + piece.length)
            window = into[(position - start) * item : (end - start) * item]
            self._read_slice(key, piece, item, (position - piece.start) * item, window)
            position, index = end, index + 1

    def read_around(self, key: str, start: int, nbytes: int, pages: memoryview) -> memoryview:
        """Like read(), for `nbytes` bytes; whole blocks of one slice are read around the page cache.

        pages: page-aligned memory, at least two pages larger than the bytes need. Returns the part of it that
        holds the bytes.
        """
        tensor, block = self._stored(key), self.manifest.block_bytes
        piece = tensor.slices[self._slice_at(key, start)]
        begin, size = (start - piece.start) * tensor.item_bytes, piece.length * tensor.item_bytes
        end = begin + nbytes
        if begin % block or end > size or (end % block and end != size):
            self.read(key, start, pages[:nbytes])
            return pages[:nbytes]
        self._count(nbytes)
        file, _ = self._file(piece.file)
        with typed(file.path):
            values = file.read_around(piece.offset + begin, nbytes, pages)
        self._check(key, piece, begin, values, nbytes)
        return values

    def check_files(self) -> None:
        """Raise unless every file is there and has its full size. Reads no contents."""
        for entry in self.manifest.files:
            with closing(self._open(entry)):
                pass

    def _stored(self, key: str) -> TensorEntry:
        tensor = self.tensor(key)
        if isinstance(tensor, WholeTensor):
            raise StateError(f"{key!r} is stored in blocks: {some([block.key for block in tensor.blocks])}")
        return tensor

    def _read_slice(self, key: str, piece: Slice, item: int, low: int, into: memoryview) -> None:
        """Fill `into` from byte `low` of a slice on: whole blocks in place, partial blocks through a copy."""
        block, size, high = self.manifest.block_bytes, piece.length * item, low + into.nbytes
        position = low
        while position < high:
            begin = position // block * block
            end = min(size, begin + block)
            if begin == position and high >= end:
                end = high if high == size else max(end, high // block * block)
                self._read_blocks(key, piece, position, into[position - low : end - low])
            else:
                cut = memoryview(bytearray(end - begin))
                self._read_blocks(key, piece, begin, cut)
                end = min(end, high)
                into[position - low : end - low] = cut[position - begin : end - begin]
            position = end

    def _read_blocks(self, key: str, piece: Slice, begin: int, into: memoryview) -> None:
        """Fill `into` with whole blocks of a slice, from its byte `begin` on, and check them."""
        file, _ = self._file(piece.file)
        with typed(file.path):
            count = file.read(piece.offset + begin, into)
        self._check(key, piece, begin, into[:count], into.nbytes)

    def _check(self, key: str, piece: Slice, begin: int, values: memoryview, wanted: int) -> None:
        """Raise unless `values` are the `wanted` bytes of a slice from `begin`, where a block begins, on."""
        file, checksums = self._file(piece.file)
        block, at = self.manifest.block_bytes, piece.offset + begin
        if values.nbytes < wanted:
            raise CorruptCheckpointError(f"{file.path} ends at byte {at + values.nbytes}, within {key!r}")
        for offset in range(0, wanted, block):
            number = 4 * (piece.block + (begin + offset) // block)
            expected = int.from_bytes(checksums[number : number + 4], "little")
            if crc32(values[offset : offset + block]) != expected:
                raise CorruptCheckpointError(
                    f"{file.path} is damaged: the checksum of {key!r} does not match at bytes "
                    f"{at + offset} to {at + min(offset + block, wanted)}; load another checkpoint"
                )

    def _slice_at(self, key: str, start: int) -> int:
        """The index of the slice that holds a tensor's element `start`."""
        return max(0, bisect_right(self._starts[key], start) - 1)

    def _file(self, index: int) -> tuple[File, bytes]:
        have = self._files.get(index)
        if have is None:
            entry = self.manifest.files[index]
            file = self._open(entry)
            try:
                have = (file, _checksums(file, entry))
            except BaseException:
                file.close()
                raise
            have = self._files.setdefault(index, have)
            if have[0] is not file:
                file.close()
        return have

    def _open(self, entry: FileEntry) -> File:
        path = self.path / entry.name
        try:
            file = self._storage.open(path, direct=self._direct)
        except OSError as error:
            raise CheckpointError(f"{path} is missing or cannot be opened: {error}") from error
        if (size := file.size()) != entry.bytes:
            file.close()
            raise CorruptCheckpointError(f"{path} has {size} bytes instead of {entry.bytes}")
        return file


def _checksums(file: File, entry: FileEntry) -> bytes:
    """The table of a file's block checksums, after checking the table and the file's header."""
    with typed(file.path):
        sizes = int.from_bytes(file.read_bytes(0, 8), "little"), entry.bytes - entry.checksums_at
        if sizes[0] > min(LONGEST_HEADER, entry.bytes) or sizes[1] > LARGEST_TABLE:
            raise CorruptCheckpointError(
                f"{file.path} is damaged: its header or its checksums cannot be as large as it says"
            )
        header, table = file.read_bytes(0, 8 + sizes[0]), file.read_bytes(entry.checksums_at, sizes[1])
    sums = (("header", header, entry.header), ("checksum table", table, entry.checksums))
    for what, buffer, expected in sums:
        if crc32(buffer) != expected:
            raise CorruptCheckpointError(f"{file.path} is damaged: the checksum of its {what} does not match")
    return table


def _present(parent: Path, name: str, storage: Storage) -> Path | None:
    """A checkpoint by name, including one that a save was about to replace when it was killed."""
    candidates = (parent / name, hidden(parent / name, "old"))
    return next((c for c in candidates if storage.exists(c / MANIFEST)), None)


def _fail_to_find(path: Path, storage: Storage, what: str) -> Path:
    found = complete(path, storage) or complete(path.parent, storage)
    raise CheckpointError(
        f"{path} is not a complete checkpoint: {what}, and there is no {MANIFEST}. Complete checkpoints "
        f"nearby: {_listed(found)}{_hint(path, storage)}"
    )


def _hint(path: Path, storage: Storage) -> str:
    """What to do with files of other formats that are there instead, as the end of an error message."""
    names = storage.names(path) if storage.is_directory(path) else [path.name]
    if any(name.endswith(".safetensors") for name in names):
        return ". Load safetensors weights with load_pretrained()"
    if any(name == LATEST or name == ".metadata" or name.endswith("_model_states.pt") for name in names):
        return ". `zero convert` converts checkpoints of DeepSpeed and of torch.distributed.checkpoint"
    return ""


def _listed(names: list[str]) -> str:
    """The last eight names, for an error message."""
    return ", ".join(names[-8:]) or "none"
