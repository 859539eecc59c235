"""Which format a path is in."""

from __future__ import annotations

from pathlib import Path

from zero.checkpoint.storage import DISK, Storage
from zero.consolidate.source import Source
from zero.consolidate.zero_source import ZeroSource
from zero.foreign.deepspeed import DeepSpeedSource, is_deepspeed


def open_source(path: str | Path, storage: Storage = DISK) -> Source:
    """The weights at `path`: a checkpoint of zero's or DeepSpeed's, or a directory of several with `latest`.

    Raises CheckpointError where there is none, or not all of one; CorruptCheckpointError for damage.
    """
    path = Path(path)
    if is_deepspeed(path):
        return DeepSpeedSource(path, storage)
    return ZeroSource(path, storage)
