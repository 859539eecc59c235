"""ACCELZ_PATIENCE: a factor to the time limits of what ranks do, for devices that are slow or shared."""

from __future__ import annotations

import os

from accelz.errors import AccelzError

PATIENCE = "ACCELZ_PATIENCE"
MOST = 1000.0


def patience() -> float:
    """The factor; 1 where the variable is not set. Raises AccelzError where it is no positive number."""
    text = os.environ.get(PATIENCE, "1")
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    if not 0 < factor <= MOST:
        raise AccelzError(f"{PATIENCE} is {text!r}; it must be a factor above 0, {MOST:g} at most, such as 2")
    return factor
