"""Reading stored tensors into tensors of a model, at most CHUNK bytes at a time."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from accelz import HOST
from zero.files.dtypes import TORCH
from zero.files.manifest import Sized
from zero.files.stream import CHUNK
from zero.files.value_forms import decode
from zero.tiers.host_memory import bytes_of


class Tensors(Protocol):
    """Stored tensors by key, of which any part can be read: an open checkpoint, or other files."""

    def tensor(self, key: str) -> Sized:
        """What is known of a tensor."""

    def read(self, key: str, start: int, into: memoryview) -> None:
        """Fill `into` with a tensor's elements from `start` on, in its memory order."""


class TensorReader:
    """Reads from a checkpoint, or from other files, through one buffer of CHUNK bytes on the host."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors
        self._buffer: Tensor | None = None

    def fill(self, key: str, target: Tensor, start: int, stride: tuple[int, ...] | None) -> None:
        """Fill `target` with a stored tensor's elements from `start` on, cast to the target's dtype.

        target: one-dimensional, in the memory order given by `stride` (None: row-major).
        """
        entry = self._tensors.tensor(key)
        if entry.stride != stride:
            target.copy_(_reordered(self.whole(key), stride)[start : start + target.numel()])
            return
        dtype, step = TORCH[entry.dtype], CHUNK // entry.item_bytes
        if self._buffer is None:
            self._buffer = torch.empty(CHUNK, dtype=torch.uint8, device=HOST)
        for first in range(0, target.numel(), step):
            part = target[first : first + step]
            staged = self._buffer[: part.numel() * entry.item_bytes]
            self._tensors.read(key, start + first, bytes_of(staged))
            part.copy_(staged.view(dtype))

    def whole(self, key: str) -> Tensor:
        """A whole tensor, on the host, in its shape."""
        entry = self._tensors.tensor(key)
        flat = torch.empty(entry.numel, dtype=TORCH[entry.dtype], device=HOST)
        self._tensors.read(key, 0, bytes_of(flat))
        return flat.view(entry.shape) if entry.stride is None else flat.as_strided(entry.shape, entry.stride)

    def same(self, first: str, second: str) -> bool:
        """Whether two tensors have the same shape, dtype and bits."""
        one, other = self._tensors.tensor(first), self._tensors.tensor(second)
        if (one.shape, one.dtype, one.stride) != (other.shape, other.dtype, other.stride):
            return False
        step = CHUNK // one.item_bytes
        for start in range(0, one.numel, step):
            size = min(step, one.numel - start) * one.item_bytes
            parts = [bytearray(size), bytearray(size)]
            for key, part in zip((first, second), parts, strict=True):
                self._tensors.read(key, start, memoryview(part))
            if parts[0] != parts[1]:
                return False
        return True

    def decode(self, value: Any) -> Any:
        """Decode user state, reading its tensors."""
        return decode(value, self.whole)


def _reordered(values: Tensor, stride: tuple[int, ...] | None) -> Tensor:
    """A tensor's elements, one-dimensional, in the memory order given by `stride`."""
    if stride is None:
        return values.contiguous().view(-1)
    other = torch.empty_strided(values.shape, stride, dtype=values.dtype, device=HOST).copy_(values)
    return other.as_strided((values.numel(),), (1,))
