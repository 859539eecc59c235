"""Human-readable sizes such as "5GB" and "512MiB", parsed and formatted."""

from __future__ import annotations

import re

from zero.errors import UsageError

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)


def size(text: str) -> int:
    """Parse a number of bytes, e.g. "5GB" (powers of 1000) or "512MiB" (of 1024); raises UsageError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match[3] and not match[2]):
        raise UsageError(f"{text!r} is not a size; write e.g. 5GB, 512MiB or a number of bytes")
    number, unit, binary = match[1], match[2].upper(), match[3]
    return int(float(number) * (_BINARY if binary else _UNITS)[unit])


def human(nbytes: float) -> str:
    """Format a number of bytes for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 999.5:  # which is 1000 in three digits
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.4g} TB"
