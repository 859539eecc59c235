"""Present values that lie in several places, one stretch after another, as one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from zero.tiers.stored import Stored
from zero.tiers.values import Values, put


def joined(parts: Sequence[Values]) -> Values:
    """Join parts in order; a single part is returned itself. All have one dtype, each may be in any tier."""
    return parts[0] if len(parts) == 1 else Joined(parts)


class Joined(Stored):
    """Values in several parts. parts: at least one, as `joined` takes them."""

    def __init__(self, parts: Sequence[Values]) -> None:
        super().__init__(sum(part.numel() for part in parts), parts[0].dtype)
        self._parts = tuple(parts)

    def to(self, device: torch.device) -> Tensor:
        return torch.cat([part.to(device) for part in self._parts])

    def read_into(self, out: Tensor) -> None:
        for window, part in self._placed():
            if isinstance(part, Stored):
                part.read_into(out[window])
            else:
                out[window].copy_(part)

    def write(self, values: Tensor) -> None:
        for window, part in self._placed():
            put(part, slice(0, part.numel()), values[window])

    def part(self, begin: int, end: int) -> Stored:
        found = [
            part[max(begin - window.start, 0) : end - window.start]
            for window, part in self._placed()
            if window.start < end and begin < window.stop
        ]
        return Joined(found or [self._parts[0][:0]])

    def _placed(self) -> Iterator[tuple[slice, Values]]:
        begin = 0
        for part in self._parts:
            yield slice(begin, begin + part.numel()), part
            begin += part.numel()
