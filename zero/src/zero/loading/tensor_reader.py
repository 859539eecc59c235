"""Reading stored tensors into tensors of a model, at most CHUNK bytes at a time, or TURNED of those that have
another memory order."""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from torch import Tensor

from accelz import HOST
from zero.files.boxes import Region, Stride, memory_order, read_region
from zero.files.dtypes import TORCH
from zero.files.manifest import Sized, blocks_of
from zero.files.stream import CHUNK
from zero.files.value_forms import decode
from zero.tiers.values import bytes_of

TURNED = 1 << 28  # bytes staged at once where memory orders differ; each time all of a tensor may be read


class Tensors(Protocol):
    """Stored tensors by key, of which any part can be read: an open checkpoint, or other files."""

    def tensor(self, key: str) -> Sized:
        """What is known of a tensor."""

    def read(self, key: str, start: int, into: memoryview) -> None:
        """Fill `into` with a tensor's elements from `start` on, in its memory order."""


class TensorReader:
    """Reads from a checkpoint, or from other files, through a buffer on the host."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors
        self._buffer: Tensor | None = None

    def fill(
        self, key: str, target: Tensor, start: int, stride: Stride, region: Region | None = None
    ) -> None:
        """Fill `target` with a stored tensor's elements from `start` on, cast to the target's dtype.

        target: one-dimensional, in the memory order given by `stride` (None: row-major). region: what of the
        tensor is wanted, whose elements are counted (None: all of it).
        """
        entry = self._tensors.tensor(key)
        dtype, buffer = TORCH[entry.dtype], self._room(key, entry, stride, target.numel() * entry.item_bytes)
        step = buffer.numel() // entry.item_bytes
        for first in range(0, target.numel(), step):
            part = target[first : first + step]
            staged = buffer[: part.numel() * entry.item_bytes]
            self._read(key, entry, start + first, stride, region, bytes_of(staged))
            part.copy_(staged.view(dtype))

    def _room(self, key: str, entry: Sized, stride: Stride, nbytes: int) -> Tensor:
        """The bytes to stage values in, of `nbytes` that are wanted in the memory order given by `stride`."""
        order = memory_order(stride, len(entry.shape))
        turned = any(memory_order(b.stride, len(order)) != order for b in blocks_of(key, entry))
        if turned and nbytes > CHUNK:
            return torch.empty(min(nbytes, TURNED), dtype=torch.uint8, device=HOST)
        if self._buffer is None:
            self._buffer = torch.empty(CHUNK, dtype=torch.uint8, device=HOST)
        return self._buffer

    def _read(
        self, key: str, entry: Sized, start: int, stride: Stride, region: Region | None, into: memoryview
    ) -> None:
        blocks = blocks_of(key, entry)
        if region is None and blocks[0].key == key and entry.stride == stride:
            self._tensors.read(key, start, into)
        else:
            whole = region or Region.whole(entry.shape)
            read_region(self._tensors.read, blocks, whole, stride, entry.item_bytes, start, into)

    def whole(self, key: str, region: Region | None = None) -> Tensor:
        """A whole tensor, or what a region has of it, on the host, in its shape."""
        entry = self._tensors.tensor(key)
        shape, stride = (entry.shape, entry.stride) if region is None else (region.shape, None)
        flat = torch.empty(math.prod(shape), dtype=TORCH[entry.dtype], device=HOST)
        self._read(key, entry, 0, stride, region, bytes_of(flat))
        return flat.view(shape) if stride is None else flat.as_strided(shape, stride)

    def shape(self, key: str) -> tuple[int, ...]:
        """The shape of a stored tensor."""
        return self._tensors.tensor(key).shape

    def same(self, first: str, second: str) -> bool:
        """Whether two tensors have the same shape, dtype and bits."""
        one, other = self._tensors.tensor(first), self._tensors.tensor(second)
        if (one.shape, one.dtype, one.stride) != (other.shape, other.dtype, other.stride):
            return False
        step = CHUNK // one.item_bytes
        for start in range(0, one.numel, step):
            size = min(step, one.numel - start) * one.item_bytes
            parts = [bytearray(size), bytearray(size)]
            for key, entry, part in zip((first, second), (one, other), parts, strict=True):
                self._read(key, entry, start, entry.stride, None, memoryview(part))
            if parts[0] != parts[1]:
                return False
        return True

    def decode(self, value: Any) -> Any:
        """Decode user state, reading its tensors."""
        return decode(value, self.whole)
