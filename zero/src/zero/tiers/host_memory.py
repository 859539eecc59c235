"""The bytes of tensors in host memory."""

from __future__ import annotations

import ctypes

from torch import Tensor


def bytes_of(values: Tensor) -> memoryview:
    """The memory of a contiguous host tensor, which the view keeps alive.

    Not through numpy: torch never resizes a storage again that numpy has seen.
    """
    nbytes = values.numel() * values.element_size()
    memory = (ctypes.c_char * nbytes).from_address(values.data_ptr())
    memory.owner = values  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")
