"""The bytes of tensors in host memory."""

from __future__ import annotations

import ctypes

from torch import Tensor


def bytes_of(values: Tensor) -> memoryview:
    """Return a view of a contiguous host tensor's memory, which keeps the tensor alive.

    numpy is avoided because torch does not resize a storage that has been exposed to it.
    """
    nbytes = values.numel() * values.element_size()
    memory = (ctypes.c_char * nbytes).from_address(values.data_ptr())
    memory.owner = values  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")
