"""fp32 masters of bf16 weights, kept as what the weights lack: 2 bytes per element instead of 4."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from accelz.updates import joined_master, split_master
from zero.tiers.values import Stored, Values, put

_CHUNK = 1 << 18  # elements read or written at a time, which bounds scratch memory


class SplitMaster(Stored):
    """Masters as the weights and remainders, which `accelz.updates.joined_master` puts together.

    weights(): the bf16 weights, in any tier. remainder: (numel,) int16, where the record is.
    """

    what = "split masters"

    def __init__(self, weights: Callable[[], Values], remainder: Values) -> None:
        super().__init__(remainder.numel(), torch.float32)
        self.weights = weights
        self.remainder = remainder

    @property
    def device(self) -> torch.device:
        return self.remainder.device

    def to(self, device: torch.device) -> Tensor:
        values = torch.empty(self.numel(), dtype=self.dtype, device=self.device)
        self.read_into(values)
        return values.to(device)

    def read_into(self, out: Tensor) -> None:
        weights, remainder = self.weights().to(self.device), self.remainder.to(self.device)
        for part in self._chunks():
            out[part].copy_(joined_master(weights[part], remainder[part]))

    def write(self, values: Tensor) -> None:
        remainder = self.remainder
        new = remainder
        if not isinstance(new, Tensor):
            new = torch.empty(self.numel(), dtype=remainder.dtype, device=self.device)
        for part in self._chunks():
            weights, rest = split_master(values[part].detach().to(self.device, self.dtype))
            put(self.weights(), part, weights)
            new[part].copy_(rest)
        if new is not remainder:
            put(remainder, slice(0, self.numel()), new)

    def part(self, begin: int, end: int) -> SplitMaster:
        return SplitMaster(lambda: self.weights()[begin:end], self.remainder[begin:end])

    def _chunks(self) -> Iterator[slice]:
        return (slice(begin, begin + _CHUNK) for begin in range(0, self.numel(), _CHUNK))
