"""Moments in 8 bits, as the values that they stand for."""

from __future__ import annotations

import torch
from torch import Tensor

from accelz.dynamic_map import BLOCK, DynamicMap
from zero.tiers.values import Stored, Values, in_memory, put

_CHUNK = 1 << 18  # elements read or written at a time, which bounds scratch memory


class Coded(Stored):
    """fp32 values, kept as codes with one scale for each block of 256.

    codes: (n,) uint8, from the beginning of a block on. scales: (ceil(n / 256),) fp32. Both are in one tier.
    skipped: elements of the first block that are before the values.
    """

    what = "moments in 8 bits"

    def __init__(self, codes: Values, scales: Values, by: DynamicMap, skipped: int = 0) -> None:
        super().__init__(codes.numel() - skipped, torch.float32)
        self.codes = codes
        self.scales = scales
        self._by = by
        self._skipped = skipped

    def to(self, device: torch.device) -> Tensor:
        values = torch.empty(self.numel(), dtype=self.dtype, device=device)
        self.read_into(values)
        return values

    def read_into(self, out: Tensor) -> None:
        if out.numel() > _CHUNK:
            for begin in range(0, out.numel(), _CHUNK):
                self[begin : begin + _CHUNK].read_into(out[begin : begin + _CHUNK])
            return
        out.copy_(self._by.decode(in_memory(self.codes), in_memory(self.scales))[self._skipped :])

    def write(self, values: Tensor) -> None:
        """Overwrite with `values`. Raises ValueError unless they begin with a block: the scale of one that
        is written in part would change what is left of it."""
        if self._skipped:
            raise ValueError("moments in 8 bits are written from the beginning of a block on")
        for begin in range(0, self.numel(), _CHUNK):
            part = values.detach()[begin : begin + _CHUNK].float()
            codes, scales = self._by.encode(part)
            for kept, first, new in ((self.codes, begin, codes), (self.scales, begin // BLOCK, scales)):
                put(kept, slice(first, first + new.numel()), new)

    def part(self, begin: int, end: int) -> Coded:
        begin, end = begin + self._skipped, end + self._skipped
        first = begin // BLOCK
        codes, scales = self.codes[first * BLOCK : end], self.scales[first : -(-end // BLOCK)]
        return Coded(codes, scales, self._by, begin - first * BLOCK)
