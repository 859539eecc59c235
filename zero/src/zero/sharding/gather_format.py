"""The gather format: in what a unit is gathered, and in what its groups travel.

A forward asks for one format of its unit, and `GatherOptions` say what of it applies to each group. A group
has one buffer for each format, so two formats of a unit share a group's buffer if they are one for the group.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class GatherFormat(NamedTuple):
    """What values are gathered in: in the parameters' own dtypes, cast, or rounded to 8 bits.

    dtype: what fp32 parameters are cast to, such as autocast's dtype; None leaves every parameter its own.
    quant_dtype: the 8-bit dtype that matrices travel in, rounded; None sends exact values. all: whether
    `dtype` applies to every fp32 parameter, or only to those that autocast casts before each use.
    """

    dtype: torch.dtype | None = None
    quant_dtype: torch.dtype | None = None
    all: bool = False


EXACT = GatherFormat()
"""The parameters' own dtypes and values."""


class GatherOptions(NamedTuple):
    """What a group's values may be converted to on their way.

    quant_dtype: the 8-bit dtype that they may be rounded to; None keeps them exact. narrows: whether autocast
    casts them before each use, so that they may be cast before they travel. own: whether they are computed
    with as codes of `quant_dtype`, which they make themselves (see `own_codes`).
    """

    quant_dtype: torch.dtype | None = None
    narrows: bool = False
    own: bool = False

    def gather_format(self, fmt: GatherFormat, dtype: torch.dtype) -> GatherFormat:
        """Return what of a unit's format applies to a group in `dtype`; applied again, it stays the same."""
        narrow = dtype is torch.float32 and (self.narrows or fmt.all)
        to = fmt.dtype if narrow else None
        if self.own and fmt.quant_dtype:
            return GatherFormat(quant_dtype=self.quant_dtype)
        return GatherFormat(to, fmt.quant_dtype and self.quant_dtype, all=to is not None)

    def buffer_dtype(self, fmt: GatherFormat, dtype: torch.dtype) -> torch.dtype:
        """The dtype of the buffer that a group in `dtype` is computed with in one of its formats."""
        return fmt.quant_dtype if self.own and fmt.quant_dtype else fmt.dtype or dtype
