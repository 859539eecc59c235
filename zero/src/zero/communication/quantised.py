"""A whole flat buffer that travels in 8 bits: half the bytes of bf16, or a quarter of those of fp32.

Symmetric and block-wise, as in ZeRO++ (Wang et al., 2023, arXiv:2306.10209): each rank quantises its shard,
codes and scales are gathered, and every rank computes the same values from them, even of its own shard. The
elements of a block belong to one parameter, so values do not depend on the number of ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from accelz import Kernels

Sent = tuple[Tensor, Tensor]
"""A tensor to be gathered, and the slice of it that this rank sends."""

QUANT_BLOCK = 128
"""Elements that share a scale, which takes 4 more bytes for each 128."""


def block_of(quant_dtype: torch.dtype | None) -> int:
    """Return how many elements must stay together: a block if they travel in `quant_dtype`, else 1."""
    return 1 if quant_dtype is None else QUANT_BLOCK


class Quantised:
    """A quantised buffer.

    codes: (numel,) int8 or float8. scales: (numel / QUANT_BLOCK,) fp32. numel is a multiple of QUANT_BLOCK.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        with torch.inference_mode(False):  # a gather that begins in inference mode may end outside of it
            self.codes = torch.empty(numel, dtype=dtype, device=device)
            self.scales = torch.empty(numel // QUANT_BLOCK, dtype=torch.float32, device=device)
            self._bytes = self.codes.view(torch.uint8)

    @staticmethod
    def nbytes_of(numel: int) -> int:
        """Return the bytes of codes and scales for `numel` elements."""
        return numel + 4 * (numel // QUANT_BLOCK)

    @property
    def nbytes(self) -> int:
        return self.nbytes_of(self.codes.numel())

    def put(self, kernels: Kernels, window: slice, values: Tensor) -> None:
        """Quantise `values` into the elements `window`, which begins and ends on block boundaries."""
        kernels.quantise(self.codes[window], self.scales[_blocks(window)], values, QUANT_BLOCK)

    def sent(self, window: slice) -> list[Sent]:
        """Return what to gather from all ranks' windows; this rank's must have been `put`."""
        return [(self._bytes, self._bytes[window]), (self.scales, self.scales[_blocks(window)])]

    def unpack(self, kernels: Kernels, output: Tensor) -> None:
        """Write the dequantised values to `output`, shape (numel,)."""
        kernels.dequantise(output, self.codes, self.scales, QUANT_BLOCK)


def _blocks(window: slice) -> slice:
    return slice(window.start // QUANT_BLOCK, window.stop // QUANT_BLOCK)
