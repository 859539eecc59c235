"""Checkpoints laid out as torch.distributed.checkpoint does, any boxes of any tensors, without ranks."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets, sizes


def save(
    folder: Path, tensors: Mapping[str, Tensor], boxes: Mapping[str, Sequence[Box]], ranks: int = 2
) -> None:
    """Boxes go to the ranks' files in turn; a tensor without boxes is one. Each keeps its memory order."""
    folder.mkdir()
    streams = [io.BytesIO() for _ in range(ranks)]
    described: dict[str, Any] = {"step": BytesStorageMetadata()}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for name, value in tensors.items():
        cut = boxes.get(name, [((0,) * value.dim(), tuple(value.shape))])
        for number, (offsets, sizes) in enumerate(cut):
            rank = number % ranks
            begin = streams[rank].tell()
            torch.save(_part(value, offsets, sizes), streams[rank])
            info = _StorageInfo(f"__{rank}_0.distcp", begin, streams[rank].tell() - begin)
            storage[MetadataIndex(name, offsets, number)] = info
        chunks = [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in cut]
        properties = TensorProperties(dtype=value.dtype)
        described[name] = TensorStorageMetadata(properties, value.shape, chunks)
    for rank, stream in enumerate(streams):
        (folder / f"__{rank}_0.distcp").write_bytes(stream.getvalue())
    write_metadata(folder, Metadata(described, storage_data=storage))


def _part(value: Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    if tuple(sizes) == tuple(value.shape):
        return value  # in its own memory order
    for dimension, (low, size) in enumerate(zip(offsets, sizes, strict=True)):
        value = value.narrow(dimension, low, size)
    return value.clone()


def read_metadata(folder: Path) -> Any:
    return pickle.loads((folder / ".metadata").read_bytes())


def write_metadata(folder: Path, metadata: Any) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
