"""One rank's file: a safetensors file with the stretches of tensors that the rank writes.

The shapes determine where everything goes (`rank_layout`), so the file is allocated first and then written
once, from front to back. Tensors that are not on the host pass through a buffer of CHUNK bytes there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accelz import HOST, Accelerator
from zero.files.dtypes import name_of
from zero.files.manifest import CHECKSUM_BLOCK
from zero.files.rank_layout import RankLayout, Stretch, block_sums
from zero.files.storage import Storage
from zero.files.stream import CHUNK, AppendedFile
from zero.tiers.values import Stored, Values, bytes_of

_CACHED = 4 * CHECKSUM_BLOCK  # bytes read for checksums, then copied while still in the processor's cache


@dataclass(frozen=True)
class Part:
    """A stretch of a tensor with its values. values: (length,), contiguous. For the rest see `Stretch`."""

    key: str
    shape: tuple[int, ...]
    values: Values
    start: int = 0
    stride: tuple[int, ...] | None = None

    @classmethod
    def whole(cls, key: str, value: Tensor) -> Part:
        """All of a dense tensor."""
        plain = value.detach().resolve_conj().resolve_neg().contiguous()
        return cls(key, tuple(value.shape), plain.view(-1))

    @property
    def nbytes(self) -> int:
        return self.values.numel() * self.values.element_size()

    @property
    def stretch(self) -> Stretch:
        """The part without its values. Raises UsageError for a dtype that files cannot hold."""
        dtype = name_of(self.values.dtype, self.key)
        return Stretch(self.key, dtype, self.shape, self.values.numel(), self.start, self.stride)


Segment = tuple[Part, int, int]  # a part, and the range of its bytes: begin, end


def write_rank_file(
    storage: Storage, accelerator: Accelerator, path: Path, parts: Sequence[Part], threads: bool = True
) -> dict[str, Any]:
    """Write and sync a rank's file; returns what the manifest has to say about it, as JSON values.

    threads: False in the background, as a save may outlast the main program, and a program that is ending
    cannot start threads. Raises OSError, and UsageError for a dtype that files cannot hold.
    """
    ordered = in_file_order(parts)
    layout = RankLayout(part.stretch for part in ordered)
    table = bytearray()  # a checksum for each block of each part
    with closing(AppendedFile(storage, path, layout.size, threads)) as file:
        file.append(memoryview(layout.header))
        for values in _on_host(accelerator, ordered):
            for begin in range(0, values.nbytes, _CACHED):
                run = values[begin : begin + _CACHED]
                table += block_sums(run)
                file.append(run)
        file.append(memoryview(table))
        file.finish()
    return layout.report(path.name, bytes(table))


def in_file_order(parts: Sequence[Part]) -> list[Part]:
    """The parts ordered by item size, largest first, which keeps every tensor aligned."""
    return sorted(parts, key=lambda part: -part.values.element_size())


def pack(accelerator: Accelerator, parts: Sequence[Part], arena: Tensor | None) -> tuple[list[Part], Tensor]:
    """Copy all parts to the host, in the order of the file.

    Returns the copies, and the uint8 buffer that holds them: `arena`, if that is large enough.
    """
    ordered = in_file_order(parts)
    room = sum(part.nbytes for part in ordered)
    if arena is None or arena.numel() < room:
        arena = accelerator.memory.empty_host((room,), torch.uint8)
    copies, end = [], 0
    for part in ordered:
        copy = arena[end : end + part.nbytes].view(part.values.dtype)
        _copy(part.values, copy)
        copies.append(replace(part, values=copy))
        end += part.nbytes
    accelerator.streams.synchronize()
    return copies, arena


def _chunks(parts: Sequence[Part]) -> Iterator[list[Segment]]:
    """All bytes of all parts in order, at most CHUNK at a time. Parts are only cut at multiples of CHUNK."""
    chunk: list[Segment] = []
    size = 0
    for part in parts:
        for begin in range(0, part.nbytes, CHUNK):
            end = min(begin + CHUNK, part.nbytes)
            if chunk and size + end - begin > CHUNK:
                yield chunk
                chunk, size = [], 0
            chunk.append((part, begin, end))
            size += end - begin
    if chunk:
        yield chunk


def _on_host(accelerator: Accelerator, parts: Sequence[Part]) -> Iterator[memoryview]:
    """The bytes of the parts in host memory, in order: views that are valid until the next one is asked for.

    What is elsewhere is copied, a chunk at a time.
    """
    buffer: Tensor | None = None
    for chunk in _chunks(parts):
        views, used = [], 0
        for part, begin, end in chunk:
            item = part.values.element_size()
            values = part.values[begin // item : end // item]
            if isinstance(values, Stored) or values.device != HOST:
                if buffer is None:
                    buffer = accelerator.memory.empty_host((CHUNK,), torch.uint8)
                staged = buffer[used : used + end - begin].view(values.dtype)
                _copy(values, staged)
                values = staged
                used += end - begin
            views.append(bytes_of(values))
        if used:
            accelerator.streams.synchronize()
        yield from views


def _copy(values: Values, out: Tensor) -> None:
    """Copy to the host. Copies from the device are complete after `streams.synchronize`."""
    if isinstance(values, Stored):
        values.read_into(out)
    else:
        out.copy_(values, non_blocking=True)
