"""Which format a path is in."""

from __future__ import annotations

from pathlib import Path

from zero.sources.dcp import DcpSource, is_dcp
from zero.sources.deepspeed import ShardedSource, UniversalSource
from zero.sources.deepspeed_files import find_sharded, find_universal
from zero.sources.safetensors_files import SafetensorsSource
from zero.sources.safetensors_header import is_safetensors
from zero.sources.source import Source
from zero.sources.torch_weights import TorchSource, is_torch
from zero.sources.zero_checkpoint import ZeroSource


def open_source(path: str | Path) -> Source:
    """The weights at `path`: a checkpoint of zero's or DeepSpeed's (sharded or universal), or the directory
    of several with `latest`; one of torch.distributed.checkpoint; or safetensors or what torch.save wrote,
    a file or a model's directory.

    Raises CheckpointError where there is none, or not all of one; CorruptCheckpointError for damage.
    """
    path = Path(path)
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
