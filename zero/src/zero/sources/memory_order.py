"""Reading tensors whose memory order is not row-major, a box at a time.

A box is a range of indices in each dimension. Boxes are chosen so that each is contiguous in row-major order;
in memory it is then a set of runs.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import NamedTuple

import numpy as np

_PRIME = (1 << 127) - 1


class Box(NamedTuple):
    """A range of indices in each dimension. lower, sizes: first index and length, by dimension."""

    lower: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def upper(self) -> tuple[int, ...]:
        """The first index beyond it in each dimension."""
        return tuple(low + size for low, size in zip(self.lower, self.sizes, strict=True))

    def meets(self, other: Box) -> Box:
        """What two boxes have in common, perhaps nothing."""
        lower = tuple(map(max, self.lower, other.lower))
        ends = map(min, self.upper, other.upper)
        return Box(lower, tuple(max(0, end - low) for low, end in zip(lower, ends, strict=True)))

    def seen_from(self, other: Box) -> Box:
        """This box with indices relative to `other`."""
        return Box(tuple(a - b for a, b in zip(self.lower, other.lower, strict=True)), self.sizes)


def indices(sizes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """All indices of a tensor in row-major order. itertools.product would first list each dimension's."""
    if not sizes:
        yield ()
        return
    for outer in indices(sizes[:-1]):
        for last in range(sizes[-1]):
            yield (*outer, last)


def count_stretches(box: Box, shape: tuple[int, ...]) -> int:
    """How many stretches() yields."""
    cut = [d for d, (size, whole) in enumerate(zip(box.sizes, shape, strict=True)) if size != whole]
    return math.prod(box.sizes[: cut[-1]]) if cut and box.numel else min(1, box.numel)


def is_partition(parts: Iterable[Box], shape: tuple[int, ...]) -> bool:
    """Whether boxes hold each element of a tensor exactly once, in time and memory that their number sets.

    A box stands for a polynomial, the sum of x₁^i₁ · x₂^i₂ · … over its indices. Those of the boxes
    add up to that of the tensor only if every index occurs once; polynomials that differ agree at a random
    point with a probability of less than 2^-58 (Schwartz, Zippel).
    """
    points = [2 + secrets.randbelow(_PRIME - 2) for _ in shape]

    @cache
    def power(dimension: int, exponent: int) -> int:
        return pow(points[dimension], exponent, _PRIME)

    def value(box: Box) -> int:
        result = 1  # times (x₁ - 1) (x₂ - 1) …
        for d, (low, end) in enumerate(zip(box.lower, box.upper, strict=True)):
            result = result * (power(d, end) - power(d, low)) % _PRIME
        return result

    return sum(map(value, parts)) % _PRIME == value(Box((0,) * len(shape), shape))


def boxes(shape: tuple[int, ...], limit: int) -> Iterator[Box]:
    """Cut a tensor into boxes of at most `limit` elements, in row-major order."""
    axis = next((d for d in range(len(shape)) if math.prod(shape[d + 1 :]) <= limit), len(shape))
    if axis == len(shape):
        yield Box((), ())
        return
    step = max(1, limit // max(1, math.prod(shape[axis + 1 :])))
    rest = shape[axis + 1 :]
    for outer in indices(shape[:axis]):
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
    for outer in indices(box.sizes[:axis]):
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
    for index in indices(sizes[:inner]):
        start = base + sum(i * step for i, step in zip(index, steps, strict=False))
        read(start, scratch)
        wanted[index] = found
