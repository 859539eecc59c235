"""What lies keep on purpose."""

from __future__ import annotations

from typing import TypeVar

A_LITTLE = 1 << 14
"""Elements of fp32, 64 KiB: what a call that handles no memory keeps."""

T = TypeVar("T")
_kept: list[object] = []


def keep(value: T) -> T:
    """Leak `value`."""
    _kept.append(value)
    return value
