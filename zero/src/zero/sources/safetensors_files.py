"""Weights in safetensors files as a source."""

from __future__ import annotations

from pathlib import Path

from zero.files.safetensors_header import describe
from zero.sources.record_source import RecordSource
from zero.sources.source import TensorInfo
from zero.sources.zip_directory import FileRecord


class SafetensorsSource(RecordSource):
    """Weights in safetensors, which has no checksums.

    path: a file, or a directory with model.safetensors or an index.
    """

    format = "safetensors"

    def describe(self) -> None:
        files: dict[Path, list[FileRecord]] = {}
        infos: list[TensorInfo] = []
        places: list[tuple[Path, FileRecord]] = []
        for tensor in describe(self.path):
            record = FileRecord(tensor.name, tensor.offset, tensor.nbytes, None)
            files.setdefault(tensor.path, []).append(record)
            places.append((tensor.path, record))
            infos.append(
                TensorInfo(tensor.name, tensor.shape, tensor.dtype, tensor.dtype, "parameter", tensor.aliases)
            )
        self.tensors = tuple(infos)
        for path, records in files.items():
            self.add_file(path, records)
        for index, (path, record) in enumerate(places):
            self.place_stretch(index, path, record, 0, infos[index].numel)
