"""The form in which values are gathered: in the parameters' own dtypes, cast, or rounded to 8 bits.

cast        what a forward asks of a whole unit.
travel      what the values of one group may be converted to on their way between ranks.
form        the part of a cast that applies to one group, as its travel allows; it is a Cast, too. A group has
            one buffer for each form, so two casts of a unit share a group's buffer if they want the same
            form.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Cast:
    """What a unit is gathered in.

    dtype: what fp32 parameters are cast to, such as autocast's dtype; None leaves every parameter its own.
    codes: the 8-bit dtype that matrices travel in, rounded; None sends exact values. all: whether `dtype`
    applies to every fp32 parameter, or only to those that autocast casts before each use.
    """

    dtype: torch.dtype | None = None
    codes: torch.dtype | None = None
    all: bool = False


OWN = Cast()
"""The parameters' own dtypes, exact."""


@dataclass(frozen=True)
class Travel:
    """What a group's values may be converted to on their way.

    codes: the 8-bit dtype that they may be rounded to; None keeps them exact. narrows: whether autocast casts
    them before each use, so that they may be cast before they travel.
    """

    codes: torch.dtype | None = None
    narrows: bool = False

    def form(self, cast: Cast, dtype: torch.dtype) -> Cast:
        """Return what of a unit's cast applies to a group in `dtype`. The form of a form is itself."""
        narrow = dtype is torch.float32 and (self.narrows or cast.all)
        to = cast.dtype if narrow else None
        return Cast(to, cast.codes and self.codes, all=to is not None)
