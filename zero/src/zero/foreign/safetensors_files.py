"""Weights in safetensors files: one, or a directory in the layout of transformers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zero.checkpoint.manifest import ITEM_BYTES
from zero.checkpoint.storage import DISK, Storage
from zero.consolidate.source import TensorInfo
from zero.errors import CheckpointError, CorruptCheckpointError
from zero.foreign.record_source import RecordSource
from zero.foreign.torch_file import Record

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_LONGEST_HEADER = 100_000_000  # bytes, the limit of safetensors


def is_safetensors(path: Path) -> bool:
    """Whether a path is a file of safetensors, or a directory with such files of a model."""
    if path.is_dir():
        return (path / INDEX).exists() or (path / WHOLE).exists()
    return path.suffix == ".safetensors" and path.exists()


class SafetensorsSource(RecordSource):
    """path: a file, or a directory with model.safetensors or an index. There are no checksums in it.

    Names in the metadata that stand for a tensor, as `safetensors.torch.save_model` leaves them, are aliases.
    """

    format = "safetensors"

    def __init__(self, path: Path, storage: Storage = DISK) -> None:
        super().__init__(storage)
        self.path = path
        try:
            self._describe()
        except BaseException:
            self.close()
            raise

    def _describe(self) -> None:
        paths = _files(self.path)
        infos: list[TensorInfo] = []
        places: list[tuple[Path, Record]] = []
        for path in paths:
            header, begin = _header(path)
            metadata = header.pop("__metadata__", {})
            records = list(_records(path, header, begin))
            self.add_file(path, [record for record, _, _ in records])
            for record, dtype, shape in records:
                aliases = tuple(alias for alias, name in metadata.items() if name == record.name)
                infos.append(TensorInfo(record.name, shape, dtype, dtype, "parameter", aliases))
                places.append((path, record))
        self.tensors = tuple(infos)
        for index, (path, record) in enumerate(places):
            self.place_record(index, path, record)
        sizes = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
        self.identity = f"safetensors {sizes}"
        self.facts = {"files": len(paths), "bytes": sum(s for _, s, _ in sizes), "checksums": "none"}


def _files(path: Path) -> list[Path]:
    """The files of a model. Raises CheckpointError for one that is not there."""
    if not path.is_dir():
        return [path]
    if not (path / INDEX).exists():
        return [path / WHOLE]
    try:
        weight_map = json.loads((path / INDEX).read_bytes())["weight_map"]
        names = sorted(set(weight_map.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpointError(f"{path / INDEX} cannot be used: {error}") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{path / INDEX} names {name!r}, which is no file beside it")
        if not (path / name).is_file():
            raise CheckpointError(f"{path} is not complete: {name} is missing")
    return [path / name for name in names]


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """A file's header, and where its data begin."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            text = file.read(length) if length <= _LONGEST_HEADER else b""
        header = json.loads(text)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{path} is cut or is no file of safetensors: {error}") from error
    metadata = header.get("__metadata__", {}) if isinstance(header, dict) else None
    if not isinstance(metadata, dict):
        raise CorruptCheckpointError(f"{path} is no file of safetensors: its header is no object")
    return header, 8 + length


def _records(
    path: Path, header: Mapping[str, Any], begin: int
) -> Iterator[tuple[Record, str, tuple[int, ...]]]:
    """Place, dtype and shape of every tensor; raises CorruptCheckpointError if they contradict each other."""
    size, end = path.stat().st_size, 0
    try:
        entries = sorted(header.items(), key=lambda item: tuple(item[1]["data_offsets"]))
        for name, entry in entries:
            first, last = entry["data_offsets"]
            shape = tuple(int(n) for n in entry["shape"])
            nbytes = math.prod(shape) * ITEM_BYTES[entry["dtype"]]
            if first != end or last - first != nbytes or min(shape, default=0) < 0:
                raise ValueError(f"{name!r} does not have the place that its shape says")
            yield Record(name, begin + first, nbytes, None), entry["dtype"], shape
            end = last
        if begin + end != size:
            raise ValueError(f"it has {size} bytes, and its tensors end at {begin + end}")
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptCheckpointError(f"{path} is cut or is no file of safetensors: {error}") from error
