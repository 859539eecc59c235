"""How zero warns: once per job of what concerns all ranks, at the program's line that led there."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from pathlib import Path

_PACKAGES = [spec.origin for name in ("zero", "accelz", "torch") if (spec := find_spec(name)) and spec.origin]
_INSIDE = (*(f"{Path(origin).parent}/" for origin in _PACKAGES), contextlib.__file__)
"""Beginnings of files whose lines are not the program's."""


Held = tuple[str, type[Warning]]
_held: ContextVar[list[Held] | None] = ContextVar("held", default=None)


def warn(message: str, category: type[Warning] = UserWarning, *, rank: int = 0) -> None:
    """Warn the user.

    rank: of what concerns all ranks alike, this rank's number in the engine's job; only rank 0 warns. Leave
    it out for what concerns this rank alone, or what no other rank may know of.
    """
    held = _held.get()
    if held is not None:
        held.append((message, category))
    elif rank == 0:
        warnings.warn(message, category, stacklevel=_depth())


@contextmanager
def held_back() -> Iterator[list[Held]]:
    """Hold back the block's warnings, for the caller to give once it knows which rank this is."""
    held: list[Held] = []
    token = _held.set(held)
    try:
        yield held
    finally:
        _held.reset(token)


def is_inside(file: str) -> bool:
    """Whether a file is of the packages, and its lines are not the program's."""
    return file.startswith(_INSIDE)


def _depth() -> int:
    """Return the stacklevel, for the caller, of the nearest line that is not inside the packages."""
    frame, depth = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame, depth = frame.f_back, depth + 1
    return depth
