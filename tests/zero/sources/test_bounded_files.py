"""Files that describe their parts many times over take no more than their size: zips, JSON, cut tensors."""

from __future__ import annotations

import io
import json
import struct
import tracemalloc
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open

import zero
from tests.zero.helpers import saved
from tests.zero.helpers.dcp_layout import read_metadata, save, write_metadata
from zero.consolidate import Options, consolidate, open_source
from zero.files import strict_json
from zero.files.boxes import Box, count_stretches, indices, is_partition, stretches
from zero.sources import torch_weights, zip_directory

E32 = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@contextmanager
def peak_below(limit: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()


def test_columns_of_a_tall_tensor_take_little_memory(tmp_path: Path) -> None:
    rows = 200_000  # a stretch for each took 200 MB
    tall = torch.arange(2 * rows, dtype=torch.int32).view(rows, 2)
    save(tmp_path / "dcp", {"tall": tall}, {"tall": [((0, 0), (rows, 1)), ((0, 1), (rows, 1))]})
    with peak_below(16 << 20), open_source(tmp_path / "dcp") as source:
        consolidate(source, tmp_path / "out", Options(dtype="keep", workers=1, memory=1 << 20))
    assert saved.same(saved.read(tmp_path / "out"), {"tall": tall})


def test_chunks_share_no_bytes(tmp_path: Path) -> None:
    """Else a file of some megabytes would be parsed and read for each of a million chunks."""
    save(tmp_path / "dcp", {"a": torch.ones(4), "b": torch.ones(4)}, {}, ranks=1)
    metadata = read_metadata(tmp_path / "dcp")
    first, *others = metadata.storage_data.values()
    for other in others:
        other.offset, other.length = first.offset, first.length
    write_metadata(tmp_path / "dcp", metadata)
    with pytest.raises(zero.CorruptCheckpointError, match="chunks overlap at byte 0"):
        open_source(tmp_path / "dcp")


@pytest.mark.parametrize(
    ("parts", "whole"),
    [
        ([((0, 0), (3, 4))], True),
        ([((0, 0), (3, 1)), ((0, 1), (3, 3))], True),
        ([((0, 0), (1, 3)), ((0, 3), (2, 1)), ((1, 0), (2, 1)), ((2, 1), (1, 3)), ((1, 1), (1, 2))], True),
        ([((0, 0), (3, 1)), ((0, 1), (3, 2))], False),
        ([((0, 0), (3, 3)), ((0, 1), (3, 1))], False),  # as many elements, some twice
        ([((0, 0), (3, 4)), ((1, 1), (1, 1))], False),
        ([], False),
    ],
)
def test_whether_boxes_are_all_of_a_tensor(parts: list[Any], whole: bool) -> None:
    assert is_partition((Box(*part) for part in parts), (3, 4)) is whole


def test_a_partition_of_what_is_huge_or_empty() -> None:
    half = 1 << 60
    assert is_partition([Box((0, 0), (half, 2)), Box((half, 0), (half, 2))], (2 * half, 2))
    assert is_partition([], (0, 5))
    assert is_partition([Box((), ())], ())


def test_indices_are_not_listed_first() -> None:
    with peak_below(1 << 20):
        assert next(indices((1 << 40, 1 << 40))) == (0, 0)
    assert list(indices((2, 3))) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]


@pytest.mark.parametrize("sizes", [(2, 3, 4), (1, 3, 4), (2, 2, 4), (2, 3, 1), (1, 1, 1), (2, 0, 4)])
def test_stretches_are_counted(sizes: tuple[int, ...]) -> None:
    box, shape = Box((0, 0, 0), sizes), (2, 3, 4)
    assert count_stretches(box, shape) == len(list(stretches(box, shape)))


def zipped(records: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, content in records.items():
            archive.writestr(name, content)
    return file.getvalue()


def listed(data: bytes) -> list[zip_directory.FileRecord]:
    return zip_directory.records(lambda at, count: data[at : at + count], len(data))


def test_records_of_a_zip_are_those_that_python_sees() -> None:
    records = {f"x/data/{n}": bytes([n]) * n for n in range(50)}
    data = zipped(records)
    found = {record.name: data[record.offset : record.offset + record.nbytes] for record in listed(data)}
    assert found == records


@pytest.mark.parametrize("change", [b"PK\1\2", b"PK\3\4", b"PK\5\6"])
def test_a_zip_that_is_damaged_is_refused(change: bytes) -> None:
    with pytest.raises(ValueError, match=r"directory|record|zip"):
        listed(zipped({"a": b"1", "b": b"2"}).replace(change, b"PK\0\0", 1))


def test_records_share_no_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytearray(zipped({"a": b"x" * 1000}))
    begin = data.index(b"PK\1\2")
    end = data.index(b"PK\5\6")
    entry = bytes(data[begin:end])
    many = entry * 10
    tail = struct.pack("<4s4xHHLL2x", b"PK\5\6", 10, 10, len(many), begin)
    with pytest.raises(ValueError, match="too many"):
        listed(bytes(data[:begin]) + many + tail)
    monkeypatch.setattr(zip_directory, "_MOST_RECORDS", 3)
    with pytest.raises(ValueError, match="too many"):
        listed(zipped({str(n): b"" for n in range(5)}))


def test_lists_of_plain_values_are_one_value(tmp_path: Path) -> None:
    """The order of a job's samples may be longer than any file has tensors."""
    torch.save({"w": torch.ones(2), "order": list(range(1_100_000))}, tmp_path / "model.pt")
    with open_source(tmp_path / "model.pt") as source:
        assert source.left_out == ("order",)


def test_names_take_no_more_than_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_weights, "_MOST_TEXT", 1000)
    torch.save({"n" * 500: {str(n): torch.ones(1) for n in range(10)}}, tmp_path / "model.pt")
    with pytest.raises(zero.CorruptCheckpointError, match="more than"):
        open_source(tmp_path / "model.pt")


@pytest.mark.parametrize(
    "text",
    [
        b'{"a":1,"a":2}', b'{"a":NaN}', b"[Infinity]", b'["\\ud800"]', b"\xef\xbb\xbf{}",
        '{"a":1}'.encode("utf-16"),
        b"[" * 10**6, b"\xff", b"", b"[1",
    ],
)  # fmt: skip
def test_json_is_strict(text: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        strict_json.parse(text)


def test_json_of_many_values_is_not_parsed() -> None:
    text = b"[" + b"{}," * (1 << 22) + b"[]]"
    with peak_below(1 << 20), pytest.raises(ValueError, match="more than"):
        strict_json.parse(text)


@pytest.mark.parametrize(
    "header",
    [
        {"a": {**E32, "shape": [1.0]}},
        {"a": {**E32, "shape": [1.9]}},
        {"a": {**E32, "shape": [True]}},
        {"a": {**E32, "shape": ["1"]}},
        {"a": {**E32, "shape": [-1]}},
        {"a": {**E32, "shape": 1}},
        {"a": {**E32, "shape": [1 << 63, 1 << 63, 0], "data_offsets": [0, 0]}, "b": E32},
        {"a": {**E32, "data_offsets": [0.0, 4.0]}},
        {"a": {**E32, "data_offsets": [0, 4, 5]}},
        {"a": {**E32, "data_offsets": [False, 4]}},
        {"a": {**E32, "data_offsets": {"0": 1, "4": 2}}},
        {"a": {**E32, "dtype": ["F32"]}},
        {"a": E32, "__metadata__": {"x": 1}},
        {"a": E32, "__metadata__": ["x"]},
        {"a": None},
        {"a\ud800": E32},
        b'{"a":{"dtype":"F32","shape":[-0],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":[1e0],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
    ],
)
def test_what_safetensors_refuses_is_refused(tmp_path: Path, header: object) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = tmp_path / "some.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    with pytest.raises(SafetensorError):
        safe_open(path, "np").__enter__()
    with pytest.raises(zero.CheckpointError, match=r"some\.safetensors"):
        open_source(path)


def test_sizes_of_many_dimensions_are_not_multiplied(tmp_path: Path) -> None:
    """Else the product has as many digits as the file, and takes a minute for 4 MB of them."""
    text = json.dumps({"a": {**E32, "shape": [1 << 61] * 100_000}}).encode()
    (tmp_path / "some.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    with pytest.raises(zero.CorruptCheckpointError, match="100,000 dimensions"):
        open_source(tmp_path / "some.safetensors")
