"""What autograd saves for a graph's backward, where the user has hooks on it: `save_on_cpu()` and the like.

Parameters are saved without values, to be gathered again, so hooks that read or copy do not see them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks


@dataclass(frozen=True)
class _Packed:
    """What the user's hook has made of a tensor."""

    value: Any


def hooks_spare_parameters() -> AbstractContextManager[Any]:
    """Around a graph's forward: hooks that are in force are called for everything but parameters."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is None:
        return nullcontext()
    pack, unpack = hooks
    return saved_tensors_hooks(
        lambda tensor: tensor if isinstance(tensor, nn.Parameter) else _Packed(pack(tensor)),
        lambda packed: unpack(packed.value) if isinstance(packed, _Packed) else packed,
    )
