"""The user's hooks on saved tensors, such as `save_on_cpu()`, around a compiled graph.

Parameters are saved without values and gathered again, so hooks that read or copy must not see them.
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
    """What the user's hook returned for a tensor."""

    value: Any


def hooks_spare_parameters() -> AbstractContextManager[Any]:
    """Have the hooks in force called for everything but parameters, around a graph's forward."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is None:
        return nullcontext()
    pack, unpack = hooks
    return saved_tensors_hooks(
        lambda tensor: tensor if isinstance(tensor, nn.Parameter) else _Packed(pack(tensor)),
        lambda packed: unpack(packed.value) if isinstance(packed, _Packed) else packed,
    )
