"""A whole flat buffer on its way in 8 bits: half the bytes of bf16, or a quarter of fp32.

Symmetric and block-wise, as in ZeRO++ (Wang et al., 2023, arXiv:2306.10209): each rank quantises its shard,
codes and scales are gathered, and every rank makes the same values of them, of its own shard as well. A block
has elements of one parameter alone, so values do not depend on how many ranks there are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from accelz.kernels import Kernels
from zero.communication.communicator import Communicator, NamedHandle

BLOCK = 128
"""Elements that share a scale: 4 bytes more for each 128."""


def block_of(codes: torch.dtype | None) -> int:
    """Elements of a buffer that have to stay together: a block of what travels in `codes`."""
    return 1 if codes is None else BLOCK


class Quantised:
    """codes: (numel,) int8 or float8. scales: (numel / BLOCK,) fp32. numel is a multiple of BLOCK."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        with torch.inference_mode(False):  # a gather that begins inside of it may end outside
            self.codes = torch.empty(numel, dtype=dtype, device=device)
            self.scales = torch.empty(numel // BLOCK, dtype=torch.float32, device=device)
            self._bytes = self.codes.view(torch.uint8)

    @staticmethod
    def nbytes_of(numel: int) -> int:
        """Bytes of codes and scales for `numel` elements."""
        return numel + 4 * (numel // BLOCK)

    @property
    def nbytes(self) -> int:
        return self.nbytes_of(self.codes.numel())

    def put(self, kernels: Kernels, window: slice, values: Tensor) -> None:
        """Quantise `values`, those of the elements `window`, which begins and ends with a block."""
        kernels.quantise(self.codes[window], self.scales[_blocks(window)], values, BLOCK)

    def all_gather(self, communicator: Communicator, unit: str, window: slice) -> list[NamedHandle]:
        """Begin to fill all of it with every rank's window; this rank's is there."""
        return [
            communicator.all_gather(unit, self._bytes, self._bytes[window]),
            communicator.all_gather(unit, self.scales, self.scales[_blocks(window)]),
        ]

    def unpack(self, kernels: Kernels, output: Tensor) -> None:
        """Write the values to `output`, shape (numel,)."""
        kernels.dequantise(output, self.codes, self.scales, BLOCK)


def _blocks(window: slice) -> slice:
    return slice(window.start // BLOCK, window.stop // BLOCK)
