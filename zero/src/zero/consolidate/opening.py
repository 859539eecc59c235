"""Which format a path is in."""

from __future__ import annotations

from pathlib import Path

from zero.checkpoint.storage import DISK, Storage
from zero.consolidate.source import Source
from zero.consolidate.zero_source import ZeroSource


def open_source(path: str | Path, storage: Storage = DISK) -> Source:
    """The weights at `path`, in whatever format; raises CheckpointError where there are none."""
    return ZeroSource(Path(path), storage)
