"""Checkpoints of torch.distributed.checkpoint, as its FileSystemWriter writes them.

    .metadata         a pickle: the tensors, the chunks they are cut into, and where each chunk is
    __0_0.distcp      the chunks of one rank, one after another, each a file of torch.save with one tensor

A chunk is a box of its tensor. Optimizer state is among the tensors, under the names that the job chose.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from zero.errors import CheckpointError, CorruptCheckpointError
from zero.files.boundary import typed
from zero.files.boxes import Box, is_partition
from zero.files.manifest import ITEM_BYTES
from zero.files.storage import DISK, read_whole
from zero.sources import inert_pickle
from zero.sources.bounded_unpickler import Function, Inert
from zero.sources.inert_pickle import DTYPES, TENSORS, StoredTensor, shape_of, sizes_of
from zero.sources.record_source import Key, RecordSource, StoredBox
from zero.sources.source import TensorInfo
from zero.sources.torch_file import TorchFile
from zero.sources.zip_directory import FileRecord

METADATA = ".metadata"
_CLASSES = """
    Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata TensorProperties MetadataIndex
    StorageMeta _MEM_FORMAT_ENCODING
"""
_COMMON = ("torch.Size", "torch.serialization._get_layout", "collections.OrderedDict")
_LARGEST_METADATA = 1 << 27  # bytes
_MOST_STEPS = 1 << 25  # of the pickle there; each chunk takes some sixty
_MOST_CHUNK_STEPS = 1 << 12  # of the pickle of a chunk, which is one tensor
_METADATA: Mapping[str, Any] = {
    **DTYPES,
    **{f"torch.distributed.checkpoint.metadata.{name}": Inert for name in _CLASSES.split()},
    "torch.distributed.checkpoint.filesystem._StorageInfo": Inert,
    **{name: TENSORS[name] for name in _COMMON},
    "pathlib.PosixPath": Function(Inert),
    "pathlib._local.PosixPath": Function(Inert),
}
Offsets = tuple[int, ...]


class _Place(NamedTuple):
    """Where a chunk lies in a file of chunks, in bytes."""

    path: Path
    offset: int
    nbytes: int

    def open(self) -> TorchFile:
        """The chunk, which is a file of its own."""
        return TorchFile(self.path, {}, self.offset, self.nbytes, most=_MOST_CHUNK_STEPS)


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
        parts = []
        for info, entry in zip(self.tensors, tensors.values(), strict=True):
            chunks = self._chunks_of(info, entry, places)
            parts.append([self._part(info, box, place) for box, place in chunks if box.numel])
        records: dict[Path, list[FileRecord]] = {self.path / METADATA: []}
        for key in (part.key for several in parts for part in several):
            records.setdefault(key.path, []).append(key.record)
        for path, held in records.items():
            self.add_file(path, held)
        for index, several in enumerate(parts):
            self.place_parts(index, several)

    def _metadata(self) -> Mapping[str, Any]:
        path = self.path / METADATA
        with typed(path):
            data = read_whole(DISK, path, _LARGEST_METADATA)
        state: Mapping[str, Any] = inert_pickle.load(data, _METADATA, path, most=_MOST_STEPS).state
        return state

    def _info(self, name: str, entry: Mapping[str, Any]) -> TensorInfo:
        dtype, shape = entry["properties"].state[0], shape_of(entry["size"])
        if not isinstance(name, str) or not isinstance(dtype, str) or dtype not in ITEM_BYTES:
            raise CorruptCheckpointError(f"{self.path}: {name!r} has a dtype that is not supported")
        return TensorInfo(name, shape, dtype, dtype, "parameter")

    def _places_of(self, stored: Mapping[Any, Any]) -> dict[tuple[str, Offsets], _Place]:
        """Where each chunk is, by its tensor's name and its offsets, checked against the files' sizes."""
        places: dict[tuple[str, Offsets], _Place] = {}
        limits: dict[str, int] = {}
        for index, info in ((key.state, value.state) for key, value in stored.items()):
            name, file = index["fqn"], info["relative_path"]
            if info.get("transform_descriptors"):
                raise CheckpointError(
                    f"{self.path}: {name!r} is compressed or encrypted, which is not supported"
                )
            if file not in limits:
                limits[file] = self._size_of(file)
            place = _Place(self.path / file, *sizes_of((info["offset"], info["length"])))
            if place.offset + place.nbytes > limits[file]:
                raise CorruptCheckpointError(f"{place.path} is truncated: it ends within {name!r}")
            places[name, sizes_of(index.get("offset") or ())] = place
        _check_apart(places.values())
        return places

    def _size_of(self, file: Any) -> int:
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{self.path / METADATA} names {file!r}, which is not a file next to it")
        if not (self.path / file).is_file():
            raise CheckpointError(f"{self.path} is incomplete: {file} is missing")
        return (self.path / file).stat().st_size

    def _chunks_of(
        self, info: TensorInfo, entry: Mapping[str, Any], places: Mapping[tuple[str, Offsets], _Place]
    ) -> list[tuple[Box, _Place]]:
        """A tensor's chunks. Raises CorruptCheckpointError unless they hold every element exactly once."""
        chunks = [self._chunk(info, chunk.state, places) for chunk in entry["chunks"]]
        if not is_partition((box for box, _ in chunks), info.shape):
            raise CorruptCheckpointError(f"{self.path}: the chunks of {info.name!r} overlap or leave gaps")
        return chunks

    def _chunk(
        self, info: TensorInfo, entry: Mapping[str, Any], places: Mapping[tuple[str, Offsets], _Place]
    ) -> tuple[Box, _Place]:
        box = Box(sizes_of(entry["offsets"]), shape_of(entry["sizes"]))
        if (info.name, box.lower) not in places:
            raise CorruptCheckpointError(f"{self.path}: the chunk of {info.name!r} at {box.lower} is missing")
        place = places[info.name, box.lower]
        outside = any(end > size for end, size in zip(box.upper, info.shape, strict=True))
        if outside or box.numel * ITEM_BYTES[info.dtype] > place.nbytes:
            raise CorruptCheckpointError(
                f"{self.path}: the chunk of {info.name!r} at {box.lower} does not fit"
            )
        return box, place

    def _part(self, info: TensorInfo, box: Box, place: _Place) -> StoredBox:
        """Where a chunk's values are in its file."""
        file = place.open()
        values = file.content
        same = isinstance(values, StoredTensor) and values.shape == box.sizes
        if not same or values.dtype != info.dtype:
            raise CorruptCheckpointError(f"{file.path}: the chunk of {info.name!r} does not match {METADATA}")
        record, offset = file.locate(values)
        return StoredBox(box, values.stride, Key(file.path, record), offset)


def _check_apart(places: Iterable[_Place]) -> None:
    """Raise CorruptCheckpointError if chunks share bytes: each would be read again and again."""
    ends: dict[Path, int] = {}
    for place in sorted(places):
        if place.nbytes and place.offset < ends.get(place.path, 0):
            raise CorruptCheckpointError(f"{place.path}: chunks overlap at byte {place.offset}")
        ends[place.path] = place.offset + place.nbytes
