"""Checkpoints of torch.distributed.checkpoint: any cut of any tensor, and nothing in them is ever run."""

from __future__ import annotations

import os
import pickle
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

import zero
from tests.zero.helpers import saved
from tests.zero.helpers.bomb import Bomb
from tests.zero.helpers.dcp_layout import Box, read_metadata, save, write_metadata
from zero.consolidate import Options, consolidate, convert, open_source, verify
from zero.sources import inert_pickle

SMALL = Options(dtype="keep", workers=3, memory=3 * 147_456)
BOXES: dict[str, list[Box]] = {
    "rows": [((0, 0), (200, 300)), ((200, 0), (57, 300))],
    "columns": [((0, 0), (31, 5)), ((0, 5), (31, 8))],
    "grid": [((0, 0, 0), (2, 3, 4)), ((0, 3, 0), (2, 2, 4)), ((2, 0, 0), (1, 3, 4)), ((2, 3, 0), (1, 2, 4))],
    "uneven": [((0,), (5,)), ((5,), (0,)), ((5,), (2,))][::2],
    "turned columns": [((0, 0), (700, 31)), ((0, 31), (700, 169))],
    "turned grid": [((0, 0), (20, 9)), ((0, 9), (20, 8)), ((20, 0), (3, 9)), ((20, 9), (3, 8))],
}


@pytest.fixture
def tensors() -> saved.State:
    torch.manual_seed(8)
    return {
        "rows": torch.randn(257, 300),
        "columns": torch.randn(31, 13).bfloat16(),
        "grid": torch.randn(3, 5, 4),
        "uneven": torch.arange(7),
        "turned": torch.randn(300, 200).t(),
        "turned columns": torch.randn(200, 700).t(),
        "turned grid": torch.randn(17, 23).half().t(),
        "gaps": torch.randn(30, 80)[:, 1:70:2],
        "flag": torch.tensor(True),
        "empty": torch.empty(0, 3),
        "half": torch.randn(9).half(),
    }


def read(path: Path, out: Path, options: Options = SMALL) -> saved.State:
    with open_source(path) as source:
        consolidate(source, out, options)
    return saved.read(out)


def test_boxes_of_all_kinds(tmp_path: Path, tensors: saved.State) -> None:
    save(tmp_path / "dcp", tensors, BOXES)
    assert saved.same(read(tmp_path / "dcp", tmp_path / "out"), tensors)
    with open_source(tmp_path / "dcp") as source:
        assert source.format == "torch DCP"
        assert source.left_out == ("step",)
        assert verify(source) == []


def test_what_torch_itself_saves(tmp_path: Path, tensors: saved.State) -> None:
    state = {"model": tensors, "optimizer": {"state": {"rows": {"exp_avg": torch.ones(3)}}}, "epoch": 3}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is surprised that there is one rank only
        dcp.save(state, checkpoint_id=tmp_path / "dcp")
    found = read(tmp_path / "dcp", tmp_path / "out", Options(dtype="keep", include=("model.*",)))
    assert saved.same({n.removeprefix("model."): v for n, v in found.items()}, tensors)


def test_converted_to_begin_a_job_with(tmp_path: Path, tensors: saved.State) -> None:
    save(tmp_path / "dcp", tensors, BOXES)
    with open_source(tmp_path / "dcp") as source:
        convert(source, tmp_path / "checkpoint", Options(dtype="stored", exclude=("flag",)))
    del tensors["flag"]
    assert saved.same(read(tmp_path / "checkpoint", tmp_path / "out"), tensors)


def test_flipped_bits_are_found(tmp_path: Path, tensors: saved.State) -> None:
    save(tmp_path / "dcp", tensors, BOXES)
    for name, needle in (("rows", tensors["rows"][100]), ("turned", tensors["turned"].t()[100])):
        path = tmp_path / "dcp" / "__0_0.distcp"
        whole = path.read_bytes()
        data = bytearray(whole)
        at = data.find(needle.contiguous().numpy().tobytes())
        assert at > 0
        data[at + 9] ^= 16
        path.write_bytes(data)
        with pytest.raises(zero.CorruptCheckpointError, match=rf"__0_0.*'{name}'"):
            read(tmp_path / "dcp", tmp_path / "out")
        path.write_bytes(whole)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dcp"]


def infos(metadata: Any, name: str = "rows") -> list[Any]:
    return [info for index, info in metadata.storage_data.items() if index.fqn == name]


def change(where: str, value: Any) -> Callable[[Any], None]:
    """Set a member of where the first chunk of "rows" is."""
    return lambda metadata: setattr(infos(metadata)[0], where, value)


def cut_chunk(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Callable[[Any], None]:
    """Say that the first chunk of "rows" is another box."""
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    return lambda metadata: metadata.state_dict_metadata["rows"].chunks.__setitem__(0, chunk)


def lose_chunk(metadata: Any) -> None:
    metadata.state_dict_metadata["rows"].chunks.pop()


def grow(metadata: Any) -> None:
    metadata.state_dict_metadata["rows"].size = torch.Size([1 << 40, 1 << 40])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (change("relative_path", "../secret"), "not a file next to it"),
        (change("relative_path", "/etc/passwd"), "not a file next to it"),
        (change("relative_path", "__7_0.distcp"), "is missing"),
        (change("offset", 1 << 50), "is truncated"),
        (change("offset", -8), "sizes"),
        (change("offset", 64), "chunks overlap"),
        (change("length", 3000), "torch.save|does not fit"),
        (change("length", 100), "does not fit"),
        (change("transform_descriptors", ("zstd",)), "compressed"),
        (cut_chunk((0, 0), (199, 300)), "overlap or leave gaps"),
        (cut_chunk((0, 0), (201, 300)), "does not fit|overlap|does not match"),
        (cut_chunk((0, 0), (1 << 30, 1)), "does not fit"),
        (cut_chunk((0, 0), (-200, -300)), "sizes"),
        (cut_chunk((1, 0), (200, 300)), "is missing"),
        (lose_chunk, "leave gaps"),
        (grow, "sizes"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, tensors: saved.State, damage: Callable[[Any], None], message: str
) -> None:
    save(tmp_path / "dcp", tensors, BOXES)
    metadata = read_metadata(tmp_path / "dcp")
    damage(metadata)
    write_metadata(tmp_path / "dcp", metadata)
    with pytest.raises(zero.CheckpointError, match=message):
        open_source(tmp_path / "dcp")


def test_cut_and_missing_files_are_named(tmp_path: Path, tensors: saved.State) -> None:
    save(tmp_path / "dcp", tensors, BOXES)
    path = tmp_path / "dcp" / "__1_0.distcp"
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(zero.CorruptCheckpointError, match=r"__1_0\.distcp is truncated"):
        open_source(tmp_path / "dcp")
    path.unlink()
    with pytest.raises(zero.CheckpointError, match=r"is incomplete: __1_0\.distcp is missing"):
        open_source(tmp_path / "dcp")
    (tmp_path / "dcp" / ".metadata").write_bytes(b"no pickle")
    with pytest.raises(zero.CorruptCheckpointError, match=r"\.metadata"):
        open_source(tmp_path / "dcp")


def test_code_in_the_metadata_is_refused_by_name_and_not_run(tmp_path: Path, tensors: saved.State) -> None:
    save(tmp_path / "dcp", tensors, BOXES)
    metadata = read_metadata(tmp_path / "dcp")
    metadata.planner_data = Bomb(tmp_path / "harm")
    write_metadata(tmp_path / "dcp", metadata)
    with pytest.raises(zero.CheckpointError, match=r"\.metadata.*posix\.mkdir"):
        open_source(tmp_path / "dcp")
    assert not (tmp_path / "harm").exists()


def test_code_in_a_chunk_is_refused_by_name_and_not_run(tmp_path: Path, tensors: saved.State) -> None:
    save(tmp_path / "dcp", tensors, BOXES)
    metadata = read_metadata(tmp_path / "dcp")
    path = tmp_path / "dcp" / "__0_0.distcp"
    whole = path.read_bytes()
    torch.save({"t": tensors["rows"], "bomb": Bomb(tmp_path / "harm")}, path)
    infos(metadata)[0].offset, infos(metadata)[0].length = len(whole), path.stat().st_size
    path.write_bytes(whole + path.read_bytes())
    write_metadata(tmp_path / "dcp", metadata)
    with pytest.raises(zero.CheckpointError, match=r"posix\.mkdir"):
        open_source(tmp_path / "dcp")
    assert not (tmp_path / "harm").exists()


REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n"


@pytest.mark.parametrize(
    "pickled",
    [
        REBUILD + b"N}(X\x0c\x00\x00\x00__defaults__(tu\x86b.",  # sets a function's defaults
        REBUILD + b"}(X\x01\x00\x00\x00a(tub.",  # gives a function an attribute
        b"ctorch\nSize\n}(X\x01\x00\x00\x00a(tub.",
        REBUILD + b")R.",  # called with nothing
        b"X\x01\x00\x00\x00aQ.",  # a storage that is a string
        b"cos\nsystem\n.",
        b"c__builtin__\neval\n.",
        b"ctorch._utils\n_rebuild_tensor_v2.__globals__\n.",
        b"\x80\x04\x8c\x00\x8c\x00\x93.",
    ],
)
def test_a_pickle_can_do_nothing(pickled: bytes) -> None:
    known = inert_pickle.TENSORS
    before = {name: repr(value) for name, value in known.items()}
    with pytest.raises(zero.CheckpointError):
        inert_pickle.load(pickled, known, Path("some"))
    assert {name: repr(value) for name, value in known.items()} == before


def test_plain_values_are_read() -> None:
    value = {"a": [1, (2.5, None)], "b": {"c": True}}
    assert inert_pickle.load(pickle.dumps(value), {}, Path("some")) == value


def test_a_pickle_that_claims_memory_gets_none() -> None:
    """The unpickler in C makes room for as many references as the highest number of one."""
    claim = b"\x80\x02Nr" + (1 << 31).to_bytes(4, "little") + b"."
    tracemalloc.start()
    try:
        inert_pickle.load(claim, {}, Path("some"))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
