"""Tensors that lie in memory in another order than row-major, read a box at a time.

A box is a range in each dimension. Boxes are chosen so that each is contiguous in row-major order; in memory
it is then a set of runs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np


class Box(NamedTuple):
    """start: its first element in row-major order. lower, sizes: first index and length by dimension."""

    start: int
    lower: tuple[int, ...]
    sizes: tuple[int, ...]


def boxes(shape: tuple[int, ...], limit: int) -> Iterator[Box]:
    """Cut a tensor into boxes of at most `limit` elements, in row-major order."""
    axis = next((d for d in range(len(shape)) if math.prod(shape[d + 1 :]) <= limit), len(shape))
    if axis == len(shape):
        yield Box(0, (), ())
        return
    inner = math.prod(shape[axis + 1 :])
    step = max(1, limit // max(1, inner))
    rest = shape[axis + 1 :]
    for number, outer in enumerate(itertools.product(*(range(n) for n in shape[:axis]))):
        for first in range(0, shape[axis], step):
            count = min(step, shape[axis] - first)
            start = (number * shape[axis] + first) * inner
            yield Box(start, (*outer, first, *(0 for _ in rest)), (*(1 for _ in outer), count, *rest))


def read_box(
    box: Box,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    item: int,
    read: Callable[[int, memoryview], None],
    into: memoryview,
) -> None:
    """Fill `into` with a box in row-major order.

    stride: the dense strides that order the tensor's elements in memory. item: bytes of an element.
    read(start, into): fills bytes with elements from `start` on, in memory order.
    """
    order = sorted(range(len(shape)), key=lambda d: stride[d], reverse=True)
    inner = len(order)
    while inner and box.sizes[order[inner - 1]] == shape[order[inner - 1]]:
        inner -= 1
    outer, run = order[: max(0, inner - 1)], order[max(0, inner - 1) :]
    length = math.prod(box.sizes[d] for d in run) * item
    scratch = bytearray(into.nbytes)
    base = sum(low * step for low, step in zip(box.lower, stride, strict=True))
    for number, index in enumerate(itertools.product(*(range(box.sizes[d]) for d in outer))):
        start = base + sum(i * stride[d] for i, d in zip(index, outer, strict=True))
        read(start, memoryview(scratch)[number * length : (number + 1) * length])
    in_memory = np.frombuffer(scratch, f"u{item}").reshape([box.sizes[d] for d in order])
    row_major = np.frombuffer(into, f"u{item}").reshape(box.sizes)
    np.copyto(row_major, in_memory.transpose(np.argsort(order)))
