"""In what form a unit's parameters are gathered."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Cast:
    """dtype: of what were fp32 parameters, such as autocast's; None leaves every parameter its own. codes:
    the 8-bit dtype that matrices travel in, which their values are rounded to; None sends exact values."""

    dtype: torch.dtype | None = None
    codes: torch.dtype | None = None


OWN = Cast()
"""As they are."""
