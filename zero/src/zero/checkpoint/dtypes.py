"""Names of dtypes in a checkpoint: those of safetensors."""

from __future__ import annotations

import torch

from zero.errors import UsageError

TORCH = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool, "C64": torch.complex64,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in TORCH.items()}


def name_of(dtype: torch.dtype, what: str) -> str:
    """The name of a dtype; raises UsageError, with `what` has it, for one that files cannot hold."""
    if dtype not in _NAMES:
        raise UsageError(
            f"{what} is {dtype}, which a checkpoint cannot hold; it holds {', '.join(map(str, _NAMES))}"
        )
    return _NAMES[dtype]
