"""Tensors that are stored in blocks, or in another memory order than row-major, in chunks that are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from zero.files.boxes import Block, Region, Run, Stored, read_region, row_major
from zero.sources.source import Chunk, Fragment


def assembled(
    tensor: int,
    shape: tuple[int, ...],
    blocks: Sequence[Block[Stored]],
    read: Callable[[Stored, int, memoryview], None],
    item: int,
    limit: int,
    gap: int,
) -> Iterator[Chunk]:
    """Chunks of a tensor, of at most `limit` bytes in memory.

    shape: that the blocks make up. item: bytes of an element. read, gap: see `read_region`.
    """
    rows = math.prod(shape[1:])
    begins, ends = np.array([_rows(block) for block in blocks], dtype=np.int64).reshape(-1, 2).T

    def elements(start: int, nbytes: int, pages: memoryview) -> memoryview:
        values, last = pages[:nbytes], start + nbytes // item - 1
        near = np.flatnonzero((begins <= last // rows) & (start // rows < ends))
        read_region(read, [blocks[int(n)] for n in near], Region.whole(shape), None, item, start, values, gap)
        return values

    most = max(1, limit // 3 // item)  # three copies exist at once
    inner = next((size for size in row_major(shape) if 0 < size <= most), 1)
    step, numel = most // inner * inner, math.prod(shape)  # whole rows: parts of them may lie far apart
    for start in range(0, numel, step):
        count = min(step, numel - start)
        yield Chunk(
            count * item, partial(elements, start, count * item), (Fragment(tensor, start, count, 0),)
        )


def _rows(block: Block[Stored]) -> tuple[int, int]:
    """The first and the last index along the first dimension that a block may have something of, + 1."""
    runs = block.region.runs[0] if block.region.runs else (Run(0, 1),)
    ends = [run.first + run.length for run in runs]
    return min((run.first for run in runs), default=0), max(ends, default=0)  # an empty block has none
