"""Where values lie in memory, to find out what shares it."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

Span = tuple[int, int]
"""The addresses of the first byte and of that after the last one."""


def span_of(item: Any) -> Span | None:
    """Return the memory of a tensor, a storage or a numpy array; None without memory, and for the rest."""
    kind, numpy = type(item), sys.modules.get("numpy")
    span = None
    if issubclass(kind, Tensor):
        span = _of_tensor(item)
    elif issubclass(kind, (torch.UntypedStorage, torch.TypedStorage)):
        begin = item.data_ptr()
        span = begin, begin + item.nbytes()
    elif numpy is not None and issubclass(kind, numpy.ndarray):
        span = _extent(item.ctypes.data, item.shape, item.strides, item.itemsize)
    return span if span is not None and span[0] and span[0] < span[1] else None


def _of_tensor(tensor: Tensor) -> Span | None:
    try:
        with torch._C.DisableTorchFunctionSubclass():  # a sharded parameter would refuse, or come
            if tensor.untyped_storage().device.type == "meta":  # of a tracer's tensor, which would warn
                return None
            begin, size = tensor.data_ptr(), tensor.element_size()
            return _extent(begin, tensor.shape, [step * size for step in tensor.stride()], size)
    except RuntimeError:  # torch.func, a subclass or the layout gives it none
        return None


def _extent(begin: int, shape: Sequence[int], steps: Sequence[int], size: int) -> Span:
    """steps: strides in bytes, which may be negative. size: of an element."""
    if 0 in shape:
        return begin, begin
    reaches = [(n - 1) * step for n, step in zip(shape, steps, strict=True)]
    return begin + sum(r for r in reaches if r < 0), begin + sum(r for r in reaches if r > 0) + size


class Spans:
    """Named spans, none of which overlap."""

    def __init__(self, named: Iterable[tuple[Span, str]]) -> None:
        self._named = sorted(named)

    def over(self, span: Span | None) -> str | None:
        """Return the name of a span that shares memory with this one, if there is one."""
        if span is None:
            return None
        place = bisect_left(self._named, (span[1], -1), key=lambda item: item[0]) - 1
        if place >= 0 and self._named[place][0][1] > span[0]:
            return self._named[place][1]
        return None
