"""Values in 8 bits, block-wise, by a dynamic map (Dettmers et al., 2022, arXiv:2110.02861), in plain torch.

A block of 256 values has one scale, its largest absolute value, and each of its values x has a code for
|x| / scale. The codes follow the paper's dynamic tree: a decade has half as many as the one above it, evenly
spread, so that large values are exact to 1 % and values a million times smaller are still told from 0. Two
things are chosen here. Each decade's codes end at its upper bound, so that the largest value of a block, of
either sign, comes back as it was: encoding what was decoded gives the same codes and scales. And where values
cannot be negative, those above 0 never become 0: an average of squares that did would let the step of its
element explode.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 256
"""Values that share a scale."""

DECADES = 7
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""Scales below the smallest normal fp32 become 0: their reciprocals overflow, and devices may flush them."""


@dataclass(frozen=True)
class DynamicMap:
    """signed: whether the highest bit of a code is the sign, and 7 are left for the size. Code 0 is 0.

    The size of a code is a piecewise linear function of its number, with one piece for each decade: convex,
    so that it is the largest of the pieces, and its inverse concave, the smallest of theirs. So neither
    direction needs a table or a branch, and every device computes the same values: nothing may be fused.
    """

    signed: bool

    @property
    def pieces(self) -> Iterator[tuple[int, float, float]]:
        """For each decade, from the uppermost: its last code, that code's size, and the step to the next."""
        for decade in range(DECADES):
            codes = (64 if self.signed else 128) >> decade
            top = 10.0**-decade
            yield 2 * codes - 1, top, 0.9 * top / codes

    def half_steps(self, sizes: Tensor) -> Tensor:
        """The most by which a code's size may differ from each of `sizes`, from 0 to 1, in their dtype."""
        found = torch.full_like(sizes, 0.55 * 10.0 ** (1 - DECADES) if self.signed else 10.0**-DECADES)
        for _, top, step in self.pieces:
            found = torch.where(sizes > top / 10, found.clamp_min(step / 2), found)
        return found

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Return the values, (n,) fp32. codes: (n,) uint8. scales: (ceil(n / 256),) fp32."""
        numbers = (codes.bitwise_and(127) if self.signed else codes).float()
        sizes = torch.zeros_like(numbers)
        for last, top, step in self.pieces:
            torch.maximum(sizes, (numbers - last).mul_(step).add_(top), out=sizes)
        sizes.masked_fill_(numbers == 0, 0.0)
        if self.signed:
            sizes.mul_(numbers.fill_(1.0).masked_fill_(codes > 127, -1.0))
        return _rows(sizes).mul_(scales.unsqueeze(1)).view(-1)[: codes.numel()]

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes and scales of values, (n,) fp32; the reverse of `decode`, to the nearest code.

        A block without a normal fp32 in it becomes 0 with scale 0. A block with a NaN or an infinity becomes
        0 with scale NaN: all of its values are then NaN.
        """
        rows = _rows(values)
        sizes = rows.abs()
        scales = sizes.amax(dim=1, keepdim=True)
        scales = torch.where(scales < SMALLEST_SCALE, 0.0, scales)
        scales = torch.where(torch.isfinite(scales), scales, math.nan)
        sizes.mul_(torch.where(scales > 0, 1 / scales, 0.0)).nan_to_num_(0.0)
        numbers = torch.full_like(sizes, 255.0)
        for last, top, step in self.pieces:
            torch.minimum(numbers, sizes.mul(1 / step).add_(last - top / step), out=numbers)
        numbers.round_().masked_fill_(sizes == 0, 0.0).clamp_min_(0.0)
        if self.signed:
            numbers.add_(128.0 * ((rows < 0) & (numbers > 0)))
        return numbers.to(torch.uint8).view(-1)[: values.numel()], scales.view(-1)


def _rows(values: Tensor) -> Tensor:
    """Return the values as one row for each block, the last one filled up with zeros."""
    tail = values.numel() % BLOCK
    return (torch.nn.functional.pad(values, (0, BLOCK - tail)) if tail else values).view(-1, BLOCK)


SIGNED, UNSIGNED = DynamicMap(signed=True), DynamicMap(signed=False)
