"""The layout of a rank's file, and what the manifest says about it. Arithmetic only, no torch.

8 bytes: length of the header | header, JSON padded to a multiple of 4096 | tensors | checksums
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any, NamedTuple
from zlib import crc32

from zero.errors import CheckpointError
from zero.files.manifest import CHECKSUM_BLOCK, CHECKSUMS, ITEM_BYTES, LARGEST_TABLE, LONGEST_HEADER
from zero.files.safetensors_header import lay_out

_METADATA = {"format": "pt", "whole": "see manifest.json"}


class Stretch(NamedTuple):
    """`numel` elements of a tensor, from element `start` on in its memory order.

    shape, stride: of the whole tensor; stride is None if its memory order is row-major.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    numel: int
    start: int = 0
    stride: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        return self.numel * ITEM_BYTES[self.dtype]

    @property
    def blocks(self) -> int:
        """The number of its checksums in the table."""
        return -(-self.nbytes // CHECKSUM_BLOCK)


def block_sums(values: memoryview) -> bytes:
    """The part of a table of checksums for bytes that begin at a block."""
    sums = [crc32(values[at : at + CHECKSUM_BLOCK]) for at in range(0, values.nbytes, CHECKSUM_BLOCK)]
    return struct.pack(f"<{len(sums)}I", *sums)


class RankLayout:
    """Where everything is in the file.

    header: its first bytes. places: the byte where each stretch begins. checksums_at: the byte where the
    table of checksums begins. size: the file's bytes. Raises CheckpointError for what no reader would take.
    """

    def __init__(self, stretches: Iterable[Stretch]) -> None:
        self.stretches = tuple(stretches)
        tensors = [(s.key, s.dtype, (s.numel,), s.nbytes) for s in self.stretches]
        blocks = sum(stretch.blocks for stretch in self.stretches)
        table = (CHECKSUMS, "U8", (blocks, 4), 4 * blocks)
        self.header, (*self.places, self.checksums_at, self.size) = lay_out(_METADATA, [*tensors, table])
        if len(self.header) > LONGEST_HEADER or self.size - self.checksums_at > LARGEST_TABLE:
            raise CheckpointError(
                f"one file cannot hold {len(tensors):,} tensors of {self.checksums_at:,} bytes: header or "
                "checksums would be larger than what is read; save from more ranks"
            )

    def report(self, name: str, table: bytes) -> dict[str, Any]:
        """What the manifest has to say about the file, as JSON values. table: the checksums."""
        tensors, block = {}, 0
        for stretch, place in zip(self.stretches, self.places, strict=True):
            piece = [stretch.start, stretch.numel, place, block] if stretch.numel else None
            tensors[stretch.key] = [stretch.dtype, stretch.shape, stretch.stride, piece]
            block += stretch.blocks
        file = {
            "name": name,
            "bytes": self.size,
            "header": crc32(self.header),
            "checksums_at": self.checksums_at,
            "checksums": crc32(table),
        }
        return {"file": file, "tensors": tensors}
