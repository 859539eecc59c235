"""Reading tensors whose memory order is not row-major, a box at a time.

A box is a range of indices in each dimension. Boxes are chosen so that each is contiguous in row-major order;
in memory it is then a set of runs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np


class Box(NamedTuple):
    """A range of indices in each dimension. lower, sizes: first index and length, by dimension."""

    lower: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def within(self, other: Box) -> Box:
        """Translate this box, whose indices are relative to `other`, into the indices that `other` uses."""
        return Box(tuple(a + b for a, b in zip(self.lower, other.lower, strict=True)), self.sizes)


def boxes(shape: tuple[int, ...], limit: int) -> Iterator[Box]:
    """Cut a tensor into boxes of at most `limit` elements, in row-major order."""
    axis = next((d for d in range(len(shape)) if math.prod(shape[d + 1 :]) <= limit), len(shape))
    if axis == len(shape):
        yield Box((), ())
        return
    step = max(1, limit // max(1, math.prod(shape[axis + 1 :])))
    rest = shape[axis + 1 :]
    for outer in itertools.product(*(range(n) for n in shape[:axis])):
        for first in range(0, shape[axis], step):
            count = min(step, shape[axis] - first)
            yield Box((*outer, first, *(0 for _ in rest)), (*(1 for _ in outer), count, *rest))


def stretches(box: Box, shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """The stretches of a row-major tensor that a box covers, in the box's own row-major order.

    Yields the start and length of each, in elements. shape: of the tensor.
    """
    if not box.numel:
        return
    axis = len(shape)
    while axis and box.sizes[axis - 1] == shape[axis - 1]:
        axis -= 1
    axis = max(0, axis - 1)  # a stretch spans the dimensions from here on, of which only this one may be cut
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    length = math.prod(box.sizes[axis:])
    base = sum(low * step for low, step in zip(box.lower, strides, strict=True))
    for outer in itertools.product(*(range(size) for size in box.sizes[:axis])):
        yield base + sum(n * step for n, step in zip(outer, strides, strict=False)), length


def span(sizes: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """The extent in memory from the first element to the last, in elements."""
    if not math.prod(sizes):
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(sizes, stride, strict=True))


def read_box(
    box: Box,
    stride: tuple[int, ...],
    item: int,
    read: Callable[[int, memoryview], None],
    into: memoryview,
) -> None:
    """Fill `into` with a box of a tensor, in row-major order.

    stride: of the tensor, in elements, none negative. item: bytes of an element. read(start, into): fills
    `into` with the tensor's bytes from element `start` on, in memory order.
    """
    order = sorted(range(len(stride)), key=lambda d: stride[d], reverse=True)
    sizes, steps = (tuple(values[d] for d in order) for values in (box.sizes, stride))
    inner = next(n for n in range(len(order) + 1) if span(sizes[n:], steps[n:]) <= box.numel)
    scratch = memoryview(bytearray(span(sizes[inner:], steps[inner:]) * item))
    in_memory = np.frombuffer(scratch, f"u{item}")
    wanted = np.frombuffer(into, f"u{item}").reshape(box.sizes).transpose(order)
    found = np.lib.stride_tricks.as_strided(in_memory, sizes[inner:], [step * item for step in steps[inner:]])
    base = sum(low * step for low, step in zip(box.lower, stride, strict=True))
    for index in itertools.product(*(range(size) for size in sizes[:inner])):
        start = base + sum(i * step for i, step in zip(index, steps, strict=False))
        read(start, scratch)
        wanted[index] = found
