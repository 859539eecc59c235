"""Writing the planned files from any thread, each tensor's bytes at their place, and comparing them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zero.consolidate.cast import cast
from zero.consolidate.plan import Chosen, OutputPlan, PlannedFile
from zero.consolidate.workers import Buffers
from zero.errors import CheckpointError
from zero.files.manifest import ITEM_BYTES
from zero.files.storage import PAGE, File, Storage, write_whole
from zero.files.stream import empty_aligned
from zero.sources.source import Chunk, TensorInfo

UNFINISHED = ".part"
_LARGE = 1 << 20  # bytes of a file


class OutputBytes(NamedTuple):
    """Bytes of one tensor as they are in the output. offset: of the first, in the file."""

    chosen: Chosen
    file: PlannedFile
    offset: int
    values: memoryview


class Converter:
    """Converts the source's chunks into parts of the planned files.

    tensors: the source's. overflowed: names of tensors with finite values that are out of range of their
    dtype in the output.
    """

    def __init__(self, plan: OutputPlan, tensors: tuple[TensorInfo, ...]) -> None:
        self._tensors = tensors
        self._places = {chosen.tensor: (chosen, file) for file in plan.files for chosen in file.tensors}
        self.overflowed: set[str] = set()

    def parts(self, chunk: Chunk, values: memoryview, scratch: memoryview) -> Iterator[OutputBytes]:
        """The parts of a chunk, each valid until the next. Tensors that are not in the plan are left out.

        values: the chunk's bytes. scratch: page-aligned memory. A part has the same offset from a page in it
        as in the file, which writing around the page cache requires.
        """
        for piece in chunk.pieces:
            if piece.tensor not in self._places:
                continue
            chosen, file = self._places[piece.tensor]
            stored = self._tensors[piece.tensor].dtype
            wide, item = ITEM_BYTES[stored], ITEM_BYTES[chosen.dtype]
            source = values[piece.at : piece.at + piece.length * wide]
            offset = file.offsets[piece.tensor] + piece.start * item
            while source.nbytes:
                shift = offset % PAGE
                count = min(source.nbytes // wide, (scratch.nbytes // PAGE * PAGE - shift) // item)
                into = scratch[shift : shift + count * item]
                self._convert(chosen, source[: count * wide], stored, into)
                yield OutputBytes(chosen, file, offset, into)
                source, offset = source[count * wide :], offset + count * item

    def _convert(self, chosen: Chosen, values: memoryview, stored: str, into: memoryview) -> None:
        if stored == chosen.dtype:
            np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(values, np.uint8))
        elif cast(values, stored, into, chosen.dtype):
            self.overflowed.add(chosen.name)


class PlacedFile:
    """A new file whose bytes are written in any order, from any thread, each exactly once.

    Large files bypass the page cache, whose copies would cost more than the disk. Only whole pages can be
    written like that, so parts of a page wait until the page is complete.
    """

    def __init__(self, storage: Storage, path: Path, size: int) -> None:
        self._file = storage.create(path, size, direct=size >= _LARGE)
        self._size = size
        self._lock = threading.Lock()
        self._waiting: dict[int, tuple[Any, int]] = {}  # by page: its memory, and how many bytes are filled

    def write(self, offset: int, data: memoryview) -> None:
        """Write bytes whose memory has the same offset from a page as their place in the file."""
        low = min(data.nbytes, -offset % PAGE)
        high = low + (data.nbytes - low) // PAGE * PAGE
        self._write_part(offset, data[:low])
        if high > low:
            self._file.write(offset + low, [data[low:high]])
        self._write_part(offset + high, data[high:])

    def write_anywhere(self, offset: int, data: bytes) -> None:
        """Write bytes with any alignment in memory."""
        shift = offset % PAGE
        pages = empty_aligned(shift + len(data))
        pages[shift : shift + len(data)] = np.frombuffer(data, np.uint8)
        self.write(offset, pages.data[shift : shift + len(data)])

    def sync(self) -> None:
        """Return once all bytes are on the disk."""
        for page, (memory, _) in self._waiting.items():  # the last page, cut short by the end of the file
            self._file.write(page * PAGE, [memory.data])
        self._file.truncate(self._size)
        self._file.sync()

    def close(self) -> None:
        self._file.close()

    def _write_part(self, offset: int, data: memoryview) -> None:
        """Take a part of a page, and write the page once all of it is there."""
        if not data.nbytes:
            return
        page, begin = divmod(offset, PAGE)
        with self._lock:
            memory, filled = self._waiting.pop(page, None) or (empty_aligned(PAGE), 0)
            memory.data[begin : begin + data.nbytes] = data
            filled += data.nbytes
            if filled < PAGE:
                self._waiting[page] = memory, filled
                return
        self._file.write(page * PAGE, [memory.data])


class Output:
    """The files of a plan in a directory. A file gets its name once all of it is on the disk.

    Files that have their name already are left as they are. pending: indices of the tensors in the other
    files. Raises OSError.
    """

    def __init__(self, storage: Storage, directory: Path, plan: OutputPlan, converter: Converter) -> None:
        self._storage = storage
        self._directory = directory
        self._converter = converter
        self._lock = threading.Lock()
        self._files: dict[str, PlacedFile] = {}
        self._left: dict[str, int] = {}
        self.pending: set[int] = set()
        try:
            for file in plan.files:
                if not storage.exists(directory / file.name):
                    self._create(file)
            for name, content in plan.others.items():
                storage.make_directories((directory / name).parent)
                storage.remove(directory / name)
                write_whole(storage, directory / name, content)
        except BaseException:
            self.close()
            raise

    def write(self, chunk: Chunk, buffers: Buffers) -> int:
        """Read a chunk and write what belongs in unfinished files. Returns the number of bytes written."""
        written = 0
        for part in self._converter.parts(chunk, chunk.read(buffers.source), buffers.output):
            if part.chosen.tensor in self.pending:
                self._files[part.file.name].write(part.offset, part.values)
                self._count(part.file, part.values.nbytes)
                written += part.values.nbytes
        return written

    def close(self) -> None:
        """Close the files that are not finished."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _create(self, file: PlannedFile) -> None:
        part = self._directory / (file.name + UNFINISHED)
        self._storage.make_directories(part.parent)
        self._storage.remove(part)
        opened = self._files[file.name] = PlacedFile(self._storage, part, file.nbytes)
        for offset, content in file.fixed:
            opened.write_anywhere(offset, content)
        self._left[file.name] = file.payload
        self.pending.update(chosen.tensor for chosen in file.tensors)
        self._count(file, 0)

    def _count(self, file: PlannedFile, nbytes: int) -> None:
        """Count bytes that were written to a file, and with the last ones sync it and give it its name."""
        with self._lock:
            self._left[file.name] -= nbytes
            if self._left[file.name]:
                return
            opened = self._files.pop(file.name)
        try:
            opened.sync()
        finally:
            opened.close()
        path = self._directory / file.name
        self._storage.rename(path.with_name(path.name + UNFINISHED), path)


@contextmanager
def comparing(
    storage: Storage, directory: Path, plan: OutputPlan, converter: Converter
) -> Iterator[Callable[[Chunk, Buffers], int]]:
    """A function that reads a chunk and what was written of it, compares, and returns the bytes compared.

    Raises OSError, and CheckpointError for a difference.
    """
    with ExitStack() as opened:
        files: dict[str, File] = {}
        for file in plan.files:
            files[file.name] = storage.open(directory / file.name, direct=True)
            opened.callback(files[file.name].close)

        def compare(chunk: Chunk, buffers: Buffers) -> int:
            half = buffers.output.nbytes // 2 // PAGE * PAGE
            mine, theirs = buffers.output[: half - 2 * PAGE], buffers.output[half:]
            compared = 0
            for part in converter.parts(chunk, chunk.read(buffers.source), mine):
                found = files[part.file.name].read_around(part.offset, part.values.nbytes, theirs)
                if not np.array_equal(np.frombuffer(found, np.uint8), np.frombuffer(part.values, np.uint8)):
                    raise CheckpointError(
                        f"{part.file.name} does not read back as it was written: {part.chosen.name!r}, from "
                        f"byte {part.offset} on; this machine's disk or memory is faulty"
                    )
                compared += found.nbytes
            return compared

        yield compare
