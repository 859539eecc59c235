"""Flat buffers in lazy mode: refused, with the reason, if the bridge cannot drop a storage's bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from accelz import BackendError, CopyAndShrink, FlatBuffer, Slot


class LazyCopyAndShrink(CopyAndShrink):
    """CopyAndShrink that first tries on one byte whether storages can be resized.

    torch resizes an hpu storage by pointing a tensor at it (`set_`) and resizing that tensor. A recorded
    tensor has no storage to be pointed at, and the bridge's `set_` refuses. The trial comes before any
    parameter is changed; BackendError is raised if it fails.
    """

    def flatten(
        self, parameters: Sequence[nn.Parameter], slots: Sequence[Slot], numel: int, dtype: torch.dtype
    ) -> FlatBuffer:
        try:
            torch.zeros(1, dtype=torch.uint8, device=self.device).untyped_storage().resize_(0)
        except RuntimeError as error:
            raise BackendError(
                f"lazy mode cannot drop the bytes of a storage, which flat buffers need ({error}); "
                "set PT_HPU_LAZY_MODE=0 for eager mode"
            ) from error
        return super().flatten(parameters, slots, numel, dtype)
