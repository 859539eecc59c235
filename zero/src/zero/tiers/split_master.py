"""Store fp32 masters of bf16 weights as what the weights lack: 2 bytes per element on disk instead of 4.

A bf16 weight is the upper half of its master, rounded to nearest, ties to even. The lower half tells which
way it was rounded, so both halves together give the master, bit for bit. One case is ambiguous: a lower half
of exactly 0x8000 was rounded to whichever neighbour is even, up or down. The places of those that were
rounded up (about one element in 131,072) are remembered.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from accelz import HOST
from zero.tiers.swap_file import Section
from zero.tiers.values import Stored, Values, put

LOWER = torch.int16
_HALF = 0x8000
_CHUNK = 1 << 18  # elements processed at a time, so that temporaries stay in the cache


class SplitMaster(Stored):
    """A split master.

    weights(): the bf16 weights, in any tier. lower: the lower halves, (numel,) int16, on disk.
    """

    def __init__(
        self, weights: Callable[[], Values], lower: Section, whole: SplitMaster | None = None
    ) -> None:
        super().__init__(lower.numel(), torch.float32)
        self.weights = weights
        self.lower = lower
        self._whole = whole or self
        self._start = 0 if whole is None else (lower.place - whole.lower.place) // LOWER.itemsize
        # Places in the whole master where a tie was rounded up.
        self._ties = torch.empty(0, dtype=torch.int64, device=HOST)

    def join(self, lower: Tensor, out: Tensor) -> None:
        """Assemble the masters in `out` from the weights and their lower halves, all on the host."""
        upper = self.weights().to(HOST)
        for begin in range(0, out.numel(), _CHUNK):
            part = slice(begin, begin + _CHUNK)
            low = lower[part].to(torch.int32).bitwise_and_(0xFFFF)
            high = upper[part].view(torch.int16).to(torch.int32)
            high.sub_((low > _HALF).to(torch.int32))
            out[part].view(torch.int32).copy_(high.bitwise_left_shift_(16).bitwise_or_(low))
        ties = self._whole._ties
        out.view(torch.int32)[ties[self._contains(ties)] - self._start] -= 1 << 16

    def split(self, master: Tensor, lower: Tensor) -> None:
        """Write the lower halves of the masters to `lower`; the weights have the upper ones already."""
        found = list[Tensor]()
        for begin in range(0, master.numel(), _CHUNK):
            part = slice(begin, begin + _CHUNK)
            bits = master[part].view(torch.int32)
            lower[part].copy_(bits.to(torch.int16))
            odd_tie = bits.bitwise_and(0x1FFFF).eq_(0x10000 | _HALF)
            if odd_tie.any():
                found.append(odd_tie.nonzero().flatten() + begin + self._start)
        ties = self._whole._ties
        self._whole._ties = torch.cat((ties[~self._contains(ties)], *found))

    def read_into(self, out: Tensor) -> None:
        self.join(self.lower.read(), out)

    def write(self, values: Tensor) -> None:
        master = values.detach().to(HOST, torch.float32).contiguous()
        lower = torch.empty(master.numel(), dtype=LOWER, device=HOST)
        self.split(master, lower)
        self.lower.write(lower)
        put(self.weights(), slice(0, self.numel()), master)

    def part(self, begin: int, end: int) -> SplitMaster:
        return SplitMaster(lambda: self.weights()[begin:end], self.lower.part(begin, end), self._whole)

    def _contains(self, places: Tensor) -> Tensor:
        return (places >= self._start) & (places < self._start + self.numel())
