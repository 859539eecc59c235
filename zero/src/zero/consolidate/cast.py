"""Values of one dtype as those of another, as torch rounds them."""

from __future__ import annotations

import numpy as np
import torch

from zero.checkpoint.dtypes import TORCH
from zero.checkpoint.manifest import ITEM_BYTES


def cast(values: memoryview, stored: str, into: memoryview, wanted: str) -> bool:
    """Fill `into` with as many elements as `values` has. stored, wanted: dtypes, named as in safetensors.

    Returns whether finite values became infinite in fp16.
    """
    source = np.frombuffer(values, np.uint8)
    if source.ctypes.data % ITEM_BYTES[stored]:
        source = source.copy()  # torch wants elements at their own multiples
    wide = torch.frombuffer(source, dtype=TORCH[stored])
    narrow = torch.frombuffer(into, dtype=TORCH[wanted]).copy_(wide)
    return wanted == "F16" and not torch.equal(narrow.isinf(), wide.isinf())
