"""Paths as users write them."""

from __future__ import annotations

import os
from pathlib import Path


def as_path(value: str | os.PathLike[str]) -> Path:
    """The path, with `~` and `~user` replaced by that user's home directory, as in a shell.

    Where there is no such user, `~name` is a name like any other. Raises TypeError for what is no path.
    """
    return Path(os.path.expanduser(value))
