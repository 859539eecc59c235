"""The format in which values are gathered: in the parameters' own dtypes, cast, or rounded to 8 bits.

cast        what a forward asks of a whole unit.
options     what the values of one group may be converted to on their way between ranks.
format      the part of a cast that applies to one group, as its options allow; it is a Cast, too. A group has
            one buffer for each format, so two casts of a unit share a group's buffer if they want the same
            format.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Cast:
    """What a unit is gathered in.

    dtype: what fp32 parameters are cast to, such as autocast's dtype; None leaves every parameter its own.
    quant_dtype: the 8-bit dtype that matrices travel in, rounded; None sends exact values. all: whether
    `dtype` applies to every fp32 parameter, or only to those that autocast casts before each use.
    """

    dtype: torch.dtype | None = None
    quant_dtype: torch.dtype | None = None
    all: bool = False


OWN = Cast()
"""The parameters' own dtypes, exact."""


@dataclass(frozen=True)
class GatherOptions:
    """What a group's values may be converted to on their way.

    quant_dtype: the 8-bit dtype that they may be rounded to; None keeps them exact. narrows: whether autocast
    casts them before each use, so that they may be cast before they travel.
    """

    quant_dtype: torch.dtype | None = None
    narrows: bool = False

    def gather_format(self, cast: Cast, dtype: torch.dtype) -> Cast:
        """Return what of a unit's cast applies to a group in `dtype`. The format of a format is itself."""
        narrow = dtype is torch.float32 and (self.narrows or cast.all)
        to = cast.dtype if narrow else None
        return Cast(to, cast.quant_dtype and self.quant_dtype, all=to is not None)
