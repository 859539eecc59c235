"""Opening weights in whichever format they are."""

from __future__ import annotations

from pathlib import Path

from zero.config.paths import as_path
from zero.files.boundary import typed
from zero.files.safetensors_header import is_safetensors
from zero.sources.dcp import DcpSource, is_dcp
from zero.sources.deepspeed import ShardedSource, UniversalSource
from zero.sources.deepspeed_files import find_sharded, find_universal
from zero.sources.safetensors_files import SafetensorsSource
from zero.sources.source import Source
from zero.sources.torch_weights import TorchSource, is_torch
from zero.sources.zero_checkpoint import ZeroSource


def open_source(path: str | Path) -> Source:
    """Open the weights at `path`.

    path: a checkpoint of zero or DeepSpeed (sharded or universal), or a directory of several with `latest`; a
    checkpoint of torch.distributed.checkpoint; or a file, or a model's directory, of safetensors or of
    torch.save. Raises CheckpointError if there is none, or only part of one, and CorruptCheckpointError if it
    is damaged.
    """
    path = as_path(path)
    with typed(path):
        if (sharded := find_sharded(path)) is not None:
            return ShardedSource(sharded)
        if (universal := find_universal(path)) is not None:
            return UniversalSource(universal)
        if is_dcp(path):
            return DcpSource(path)
        if is_safetensors(path):
            return SafetensorsSource(path)
        if is_torch(path):
            return TorchSource(path)
        return ZeroSource(path)
