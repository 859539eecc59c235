"""Files of torch.save as an output: what torch itself would write, with gaps where the tensors' bytes go.

torch saves tensors without values and skips their bytes; the zip's directory then says where the gap for each
is. The records' checksums stay zero, as with `torch.serialization.set_crc32_options(False)`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from accelz import HOST
from zero.consolidate.plan import Chosen, OutputPlan, PlannedFile, file_name, index_of, shards
from zero.files.dtypes import TORCH
from zero.sources.torch_file import records_of
from zero.sources.zip_directory import FileRecord


def plan_torch(tensors: Sequence[Chosen], limit: int) -> OutputPlan:
    """The files of a model, each of which torch.load reads as a dict. limit: bytes of tensors in one file.

    A tied tensor is one tensor under several names.
    """
    parts = shards(tensors, limit)
    files = [_file(part, number, len(parts)) for number, part in enumerate(parts)]
    others = {"pytorch_model.bin.index.json": index_of(files, with_aliases=True)} if len(files) > 1 else {}
    return OutputPlan(tuple(files), others)


def _file(tensors: Sequence[Chosen], number: int, count: int) -> PlannedFile:
    def content(values: Mapping[int, Tensor]) -> dict[str, Tensor]:
        return {name: values[t.tensor] for t in tensors for name in (t.name, *t.aliases)}

    return plan_file(file_name("pytorch_model", ".bin", number, count), tensors, content)


def plan_file(
    name: str, tensors: Sequence[Chosen], content: Callable[[Mapping[int, Tensor]], Any]
) -> PlannedFile:
    """Plan a file of torch.save.

    content(values): the object to save, given the tensors by their index in the source, which has to come to
    them in their order. It may hold other tensors, which have to be small and have values.
    """
    with FakeTensorMode():
        values = {t.tensor: torch.empty(t.shape, dtype=TORCH[t.dtype], device=HOST) for t in tensors}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "skeleton"  # sparse: torch skips the gaps, which take no space
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(content(values), path)
        records = {record.name.partition("/data/")[2]: record for record in records_of(path)}
        rooms = [records[str(key)] for key in range(len(tensors))]  # torch numbers storages as it meets them
        offsets = {t.tensor: room.offset for t, room in zip(tensors, rooms, strict=True)}
        rest = tuple(_rest(path, rooms))
        return PlannedFile(name, path.stat().st_size, offsets, tuple(tensors), rest)


def _rest(path: Path, rooms: Sequence[FileRecord]) -> list[tuple[int, bytes]]:
    """Everything outside the tensors' gaps, with its offsets."""
    found, position = [], 0
    with path.open("rb") as file:
        gaps = sorted((room.offset, room.nbytes) for room in rooms)
        for begin, nbytes in (*gaps, (path.stat().st_size, 0)):
            file.seek(position)
            found.append((position, file.read(begin - position)))
            position = begin + nbytes
    return found
