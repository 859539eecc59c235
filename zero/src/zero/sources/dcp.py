"""Checkpoints of torch.distributed.checkpoint, as its FileSystemWriter writes them.

    .metadata         a pickle: the tensors, the chunks they are cut into, and where each chunk is
    __0_0.distcp      the chunks of one rank, one after another, each a file of torch.save with one tensor

A chunk is a box of its tensor. Optimizer state is among the tensors, under the names that the job chose.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from zero.checkpoint.manifest import ITEM_BYTES
from zero.errors import CheckpointError, CorruptCheckpointError
from zero.sources import inert_pickle
from zero.sources.inert_pickle import DTYPES, Function, Kept, StoredTensor
from zero.sources.memory_order import Box, stretches
from zero.sources.record_source import RecordSource
from zero.sources.source import TensorInfo
from zero.sources.torch_file import TorchFile

METADATA = ".metadata"
_CLASSES = """
    Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata TensorProperties MetadataIndex
    StorageMeta _MEM_FORMAT_ENCODING
"""
_METADATA: Mapping[str, Any] = {
    **DTYPES,
    **{f"torch.distributed.checkpoint.metadata.{name}": Kept for name in _CLASSES.split()},
    "torch.distributed.checkpoint.filesystem._StorageInfo": Kept,
    "torch.Size": tuple,
    "torch.serialization._get_layout": Function(Kept),
    "pathlib.PosixPath": Function(Kept),
    "pathlib._local.PosixPath": Function(Kept),
    "collections.OrderedDict": dict,
}
Sizes = tuple[int, ...]


class _Place(NamedTuple):
    """Where a chunk lies in a file of chunks, in bytes."""

    path: Path
    offset: int
    nbytes: int


class _Chunk(NamedTuple):
    """A box of a tensor. tensor: the tensor's index."""

    tensor: int
    offsets: Sizes
    sizes: Sizes
    place: _Place


def is_dcp(path: Path) -> bool:
    """Whether a path is a directory that torch.distributed.checkpoint has written."""
    return (path / METADATA).is_file()


class DcpSource(RecordSource):
    """path: the directory with `.metadata`. Chunks have checksums unless torch was told to leave them out."""

    format = "torch DCP"
    summed = "chunk"

    def describe(self) -> None:
        metadata = self._metadata()
        described = metadata["state_dict_metadata"]
        tensors = {name: entry.state for name, entry in described.items() if entry.state}
        self.left_out = tuple(name for name in described if name not in tensors)
        self.tensors = tuple(self._info(name, entry) for name, entry in tensors.items())
        places = self._places_of(metadata["storage_data"])
        by_file: dict[Path, list[_Chunk]] = {}
        for index, entry in enumerate(tensors.values()):
            for chunk in self._chunks_of(index, entry, places):
                by_file.setdefault(chunk.place.path, []).append(chunk)
        self.add_file(self.path / METADATA, [])
        for path, chunks in by_file.items():
            self._lay_out(path, chunks)

    def _metadata(self) -> Mapping[str, Any]:
        path = self.path / METADATA
        try:
            data = path.read_bytes()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        state: Mapping[str, Any] = inert_pickle.load(data, _METADATA, path).state
        return state

    def _info(self, name: str, entry: Mapping[str, Any]) -> TensorInfo:
        dtype, shape = entry["properties"].state[0], _sizes(entry["size"])
        if not isinstance(name, str) or dtype not in ITEM_BYTES:
            raise CorruptCheckpointError(
                f"{self.path}: {name!r} has the dtype {dtype!r}, which is not supported"
            )
        return TensorInfo(name, shape, dtype, dtype, "parameter")

    def _places_of(self, stored: Mapping[Any, Any]) -> dict[tuple[str, Sizes], _Place]:
        """Where each chunk is, by its tensor's name and its offsets, checked against the files' sizes."""
        places: dict[tuple[str, Sizes], _Place] = {}
        limits: dict[str, int] = {}
        for index, info in ((key.state, value.state) for key, value in stored.items()):
            name, file = index["fqn"], info["relative_path"]
            if info.get("transform_descriptors"):
                raise CheckpointError(
                    f"{self.path}: {name!r} is compressed or encrypted, which is not supported"
                )
            if file not in limits:
                limits[file] = self._size_of(file)
            place = _Place(self.path / file, int(info["offset"]), int(info["length"]))
            if min(place.offset, place.nbytes) < 0 or place.offset + place.nbytes > limits[file]:
                raise CorruptCheckpointError(f"{place.path} is truncated: it ends within {name!r}")
            places[name, _sizes(index.get("offset") or ())] = place
        return places

    def _size_of(self, file: Any) -> int:
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{self.path / METADATA} names {file!r}, which is not a file next to it")
        if not (self.path / file).is_file():
            raise CheckpointError(f"{self.path} is incomplete: {file} is missing")
        return (self.path / file).stat().st_size

    def _chunks_of(
        self, index: int, entry: Mapping[str, Any], places: Mapping[tuple[str, Sizes], _Place]
    ) -> Iterator[_Chunk]:
        """A tensor's chunks. Raises CorruptCheckpointError unless they hold every element exactly once."""
        info, parts = self.tensors[index], []
        for offsets, sizes in (
            (_sizes(c.state["offsets"]), _sizes(c.state["sizes"])) for c in entry["chunks"]
        ):
            if (info.name, offsets) not in places:
                raise CorruptCheckpointError(
                    f"{self.path}: the chunk of {info.name!r} at {offsets} is missing"
                )
            chunk = _Chunk(index, offsets, sizes, places[info.name, offsets])
            ends = [low + size for low, size in zip(offsets, sizes, strict=True)]
            nbytes = math.prod(sizes) * ITEM_BYTES[info.dtype]
            if any(e > n for e, n in zip(ends, info.shape, strict=True)) or nbytes > chunk.place.nbytes:
                raise CorruptCheckpointError(
                    f"{self.path}: the chunk of {info.name!r} at {offsets} does not fit"
                )
            parts += list(stretches(Box(offsets, sizes), info.shape))
            yield chunk
        end = 0
        for start, length in sorted(parts):
            if start != end:
                break
            end += length
        if end != info.numel:
            raise CorruptCheckpointError(f"{self.path}: the chunks of {info.name!r} overlap or leave gaps")

    def _lay_out(self, path: Path, chunks: list[_Chunk]) -> None:
        """Register the chunks in one file, and where their bytes are."""
        found = [(chunk, TorchFile(path, {}, *chunk.place[1:])) for chunk in chunks]
        for chunk, file in found:
            self._check_chunk(chunk, file.content)
        found = [(chunk, file) for chunk, file in found if math.prod(chunk.sizes)]
        self.add_file(path, [file.locate(file.content)[0] for _, file in found])
        for chunk, file in found:
            shape = self.tensors[chunk.tensor].shape
            self.place_box(chunk.tensor, Box(chunk.offsets, chunk.sizes), shape, file, file.content)

    def _check_chunk(self, chunk: _Chunk, content: Any) -> None:
        info = self.tensors[chunk.tensor]
        same = isinstance(content, StoredTensor) and content.shape == chunk.sizes
        if not same or content.dtype != info.dtype:
            raise CorruptCheckpointError(
                f"{chunk.place.path}: the chunk of {info.name!r} does not match {METADATA}"
            )


def _sizes(value: Any) -> Sizes:
    sizes = tuple(int(n) for n in value)
    if min(sizes, default=0) < 0 or math.prod(sizes) >= 1 << 62:
        raise ValueError(f"{sizes} are not valid sizes")
    return sizes
