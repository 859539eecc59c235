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
        found = describe(self.path)
        self.tensors = tuple(
            TensorInfo(t.name, t.shape, t.dtype, t.dtype, "parameter", t.aliases) for t in found
        )
        for index, tensor in enumerate(found):
            record = FileRecord(tensor.name, tensor.offset, tensor.nbytes, None)
            files.setdefault(tensor.path, []).append(record)
            self.place_stretch(index, tensor.path, record, 0, tensor.numel)
        for path, records in files.items():
            self.add_file(path, records)
