"""In what form a unit's parameters are gathered, and what of it applies to a group."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Cast:
    """dtype: of what were fp32 parameters, such as autocast's; None leaves every parameter its own. codes:
    the 8-bit dtype that matrices travel in, which their values are rounded to; None sends exact values.
    all: whether `dtype` is for every fp32 parameter, or for those that autocast casts before each use."""

    dtype: torch.dtype | None = None
    codes: torch.dtype | None = None
    all: bool = False


OWN = Cast()
"""As they are."""


@dataclass(frozen=True)
class Travel:
    """What the values of a group may become on their way. codes: the 8-bit dtype that they are rounded to;
    None keeps them exact always. narrows: whether autocast casts them before each use."""

    codes: torch.dtype | None = None
    narrows: bool = False

    def form(self, cast: Cast, dtype: torch.dtype) -> Cast:
        """What of a unit's cast applies to values in `dtype`; applied to that once more, it is the same."""
        narrow = dtype is torch.float32 and (self.narrows or cast.all)
        to = cast.dtype if narrow else None
        return Cast(to, cast.codes and self.codes, all=to is not None)
