"""Parts of tensors, and reading them from memory of any order.

A box is a range of indices in each dimension, a region several ranges in each, one after another. Boxes that
are contiguous in one memory order are sets of stretches in another.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from itertools import product
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

_PRIME = (1 << 127) - 1
_SCRATCH = 1 << 20  # bytes that are read at once
_SUMMED = 1 << 16  # bytes under one checksum of a checkpoint, which are read for any of them


class Run(NamedTuple):
    """Indices from `first` on."""

    first: int
    length: int


Runs = tuple[tuple[Run, ...], ...]  # by dimension
Stride = tuple[int, ...] | None  # in elements; None: row-major
Stored = TypeVar("Stored")


class Box(NamedTuple):
    """A range of indices in each dimension. lower, sizes: first index and length, by dimension."""

    lower: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def runs(self) -> Runs:
        return tuple((Run(low, size),) for low, size in zip(self.lower, self.sizes, strict=True))

    @property
    def slices(self) -> tuple[slice, ...]:
        """Indices into an array of the tensor."""
        return tuple(map(slice, self.lower, self.upper))

    @property
    def upper(self) -> tuple[int, ...]:
        """The first index beyond it in each dimension."""
        return tuple(low + size for low, size in zip(self.lower, self.sizes, strict=True))


class Region(NamedTuple):
    """What a rank has of a tensor. runs: for each dimension, indices of the tensor in their order here."""

    runs: Runs

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Region:
        return cls(tuple((Run(0, size),) for size in shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(sum(run.length for run in runs) for runs in self.runs)

    def common(self, box: Box, other: Region) -> Iterator[tuple[Box, Box]]:
        """What a box of this region has in common with another region: boxes, as seen from the box and from
        the other."""
        found = [
            _overlaps(mine, low, size, runs)
            for mine, low, size, runs in zip(self.runs, box.lower, box.sizes, other.runs, strict=True)
        ]
        for several in product(*found):
            sizes = tuple(length for _, _, length in several)
            yield Box(tuple(at for at, _, _ in several), sizes), Box(tuple(at for _, at, _ in several), sizes)


def _overlaps(mine: Sequence[Run], low: int, size: int, others: Sequence[Run]) -> list[tuple[int, int, int]]:
    """Where indices `low` to `low + size` of some runs are among others, as (place from `low` on, place in
    the others, length)."""
    found, at = [], -low
    for first, length in mine:
        begin, end = max(first, first - at), min(first + length, first + size - at)
        there = 0
        for other, long in others:
            lower, upper = max(begin, other), min(end, other + long)
            if lower < upper:
                found.append((at + lower - first, there + lower - other, upper - lower))
            there += long
        at += length
    return found


class Block(NamedTuple, Generic[Stored]):
    """A stored tensor that is a region of another, or all of it. key: of the stored one. stride: its own, in
    elements; None where its memory order is row-major."""

    key: Stored
    region: Region
    stride: Stride


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


def is_partition(parts: Iterable[Box | Region], shape: tuple[int, ...]) -> bool:
    """Whether boxes or regions hold each element of a tensor exactly once, in time and memory that their
    number sets.

    A part stands for a polynomial, the sum of x₁^i₁ · x₂^i₂ · … over its indices. Those of the parts
    add up to that of the tensor only if every index occurs once; polynomials that differ agree at a random
    point with a probability of less than 2^-58 (Schwartz, Zippel).
    """
    points = [2 + secrets.randbelow(_PRIME - 2) for _ in shape]

    @cache
    def power(dimension: int, exponent: int) -> int:
        return pow(points[dimension], exponent, _PRIME)

    def value(part: Box | Region) -> int:
        result = 1  # times (x₁ - 1) (x₂ - 1) …
        for d, runs in enumerate(part.runs):
            result = result * sum(power(d, low + size) - power(d, low) for low, size in runs) % _PRIME
        return result

    return sum(map(value, parts)) % _PRIME == value(Region.whole(shape))


def boxes_between(sizes: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """The boxes that make up elements `start` to `stop` of a row-major tensor, in order."""
    if not sizes and start < stop:
        yield Box((), ())
    if start >= stop or not sizes:
        return
    inner = math.prod(sizes[1:])
    first, last = -(-start // inner), stop // inner  # whole rows

    def of_row(row: int) -> Iterator[Box]:
        begin, end = max(0, start - row * inner), min(inner, stop - row * inner)
        for box in boxes_between(sizes[1:], begin, end):
            yield Box((row, *box.lower), (1, *box.sizes))

    if start < first * inner:
        yield from of_row(first - 1)
    if first < last:
        yield Box((first, *(0 for _ in sizes[1:])), (last - first, *sizes[1:]))
    if first <= last and last * inner < stop:
        yield from of_row(last)


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
    strides = row_major(shape)
    length = math.prod(box.sizes[axis:])
    base = sum(low * step for low, step in zip(box.lower, strides, strict=True))
    for outer in indices(box.sizes[:axis]):
        yield base + sum(n * step for n, step in zip(outer, strides, strict=False)), length


def span(sizes: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """The extent in memory from the first element to the last, in elements."""
    if not math.prod(sizes):
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(sizes, stride, strict=True))


def read_region(
    read: Callable[[Stored, int, memoryview], None],
    blocks: Iterable[Block[Stored]],
    region: Region,
    stride: Stride,
    item: int,
    start: int,
    into: memoryview,
    gap: int = _SUMMED,
) -> None:
    """Fill `into` with elements of a region of a tensor, from element `start` of the region on.

    The elements are counted in the memory order given by `stride` (None: row-major). read(key, start, into):
    fills `into` with the bytes of a stored tensor from its element `start` on. blocks: those that make up the
    tensor. item: bytes of an element. gap: bytes between two stretches up to which they are read along.
    """
    shape = region.shape
    order = memory_order(stride, len(shape))
    back = sorted(range(len(shape)), key=order.__getitem__)
    values, position = np.frombuffer(into, f"u{item}"), 0
    for turned in boxes_between(tuple(shape[d] for d in order), start, start + values.size):
        room = values[position : position + turned.numel].reshape(turned.sizes).transpose(back)
        position += turned.numel
        box = Box(*(tuple(of_order[place] for place in back) for of_order in turned))
        for block in blocks:
            steps = block.stride or row_major(block.region.shape)
            for here, there in region.common(box, block.region):
                read_box(there, steps, item, partial(read, block.key), room[here.slices], gap)


def memory_order(stride: Stride, dimensions: int) -> tuple[int, ...]:
    """The dimensions from the slowest in memory to the fastest. stride None: row-major."""
    return tuple(sorted(range(dimensions), key=lambda d: 0 if stride is None else -stride[d]))


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


def read_box(
    box: Box, stride: tuple[int, ...], item: int, read: Callable[[int, memoryview], None], into: Any, gap: int
) -> None:
    """Fill `into`, an array of the box's sizes, with a box of a tensor.

    stride: of the tensor, in elements, none negative. item: bytes of an element. read(start, into): fills
    `into` with the tensor's bytes from element `start` on, in memory order. gap: bytes between two stretches
    of the box up to which they are read along.
    """
    base = sum(low * step for low, step in zip(box.lower, stride, strict=True))
    order = memory_order(stride, len(stride))
    sizes, steps = ((first, *(of[d] for d in order)) for first, of in ((1, box.sizes), (0, stride)))
    wanted = into.transpose(order)[None]
    axis = next(n for n in range(len(sizes)) if _is_readable(sizes[n + 1 :], steps[n + 1 :], item, gap))
    inner = span(sizes[axis + 1 :], steps[axis + 1 :])
    rows = 1
    if (steps[axis] - inner) * item <= gap:
        rows = max(1, 1 + (_SCRATCH // item - inner) // max(1, steps[axis]))
    for outer in indices(sizes[:axis]):
        for first in range(0, sizes[axis], rows):
            part = (min(rows, sizes[axis] - first), *sizes[axis + 1 :])
            scratch = memoryview(bytearray(span(part, steps[axis:]) * item))
            begin = sum(n * step for n, step in zip((*outer, first), steps, strict=False))
            read(base + begin, scratch)
            found = np.lib.stride_tricks.as_strided(
                np.frombuffer(scratch, f"u{item}"), part, [step * item for step in steps[axis:]]
            )
            wanted[(*outer, slice(first, first + part[0]))] = found


def _is_readable(sizes: tuple[int, ...], steps: tuple[int, ...], item: int, gap: int) -> bool:
    """Whether a box of a tensor may be read at once: its gaps are small, and so is it."""
    inner = 1
    for size, step in zip(reversed(sizes), reversed(steps), strict=True):
        if size > 1 and (step - inner) * item > gap:
            return False
        inner += (size - 1) * step
    return inner * item <= _SCRATCH
