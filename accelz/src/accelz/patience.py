"""ACCELZ_PATIENCE: a factor by which time limits on ranks are multiplied, for slow or shared devices."""

from __future__ import annotations

import os

from accelz.errors import AccelzError

PATIENCE = "ACCELZ_PATIENCE"
MOST = 1000.0


def patience() -> float:
    """Return the factor; 1 if the variable is not set. Raises AccelzError unless it is in (0, MOST]."""
    text = os.environ.get(PATIENCE, "1")
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    if not 0 < factor <= MOST:
        raise AccelzError(f"{PATIENCE} is {text!r}; it must be a factor above 0, {MOST:g} at most, such as 2")
    return factor
