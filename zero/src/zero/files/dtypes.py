"""Torch's dtypes by the names that they have in files, which are those of safetensors."""

from __future__ import annotations

import torch

from zero.errors import UsageError
from zero.files.manifest import TORCH_NAMES

TORCH: dict[str, torch.dtype] = {name: getattr(torch, torch_name) for name, torch_name in TORCH_NAMES.items()}
_NAMES = {dtype: name for name, dtype in TORCH.items()}


def name_of(dtype: torch.dtype, what: str) -> str:
    """The name of a dtype. Raises UsageError, which says that `what` has it, if files cannot hold it."""
    if dtype not in _NAMES:
        raise UsageError(
            f"{what} is {dtype}, which a checkpoint cannot hold; it holds {', '.join(map(str, _NAMES))}"
        )
    return _NAMES[dtype]
