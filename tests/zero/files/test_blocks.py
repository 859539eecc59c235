"""Tensors that are stored in blocks: any part of any, and manifests that say wrong of them."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import zero
from tests.zero.helpers import synthetic
from zero.consolidate import Options, consolidate, open_source
from zero.files import manifest as form
from zero.files.boxes import Block, Region, Run, is_partition, read_region, row_major
from zero.files.reader import Checkpoint
from zero.loading import tensor_reader
from zero.loading.tensor_reader import TensorReader

SHAPE = (5, 7, 6)


def region(*runs: list[tuple[int, int]]) -> Region:
    return Region(tuple(tuple(Run(*run) for run in each) for each in runs))


def of(whole: Tensor, part: Region) -> Tensor:
    for dim, runs in enumerate(part.runs):
        indices = [i for first, length in runs for i in range(first, first + length)]
        whole = whole.index_select(dim, torch.tensor(indices, dtype=torch.int64))
    return whole


ALL = [[(0, 5)], [(0, 7)], [(0, 6)]]
BLOCKS = [
    region([(0, 3)], [(0, 7)], [(0, 6)]),
    region([(3, 2)], [(0, 1), (5, 2)], [(0, 6)]),
    region([(3, 2)], [(4, 1), (1, 3)], [(2, 4), (0, 2)]),
    region([(3, 2)], [], [(0, 6)]),
]
WANTED = [
    Region.whole(SHAPE),
    region([(1, 4)], [(0, 7)], [(0, 6)]),
    region([(0, 5)], [(6, 1), (0, 5)], [(5, 1), (0, 1)]),
    region([(4, 1)], [(3, 2)], [(1, 4)]),
    region([(4, 1), (0, 1)], [(2, 4)], [(3, 3), (0, 3)]),
]


@pytest.mark.parametrize("wanted", WANTED)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_any_part_of_any_region(wanted: Region, order: tuple[int, ...]) -> None:
    """Blocks in two memory orders; the region in a third, from any element on."""
    assert is_partition(BLOCKS, SHAPE)
    whole, memory, blocks = torch.arange(210, dtype=torch.int32).view(SHAPE), {}, []
    for number, each in enumerate(BLOCKS):
        block = of(whole, each)
        block = block.contiguous()
        turned = block.permute(2, 1, 0).contiguous() if number % 2 else block
        memory[str(number)] = memoryview(turned.reshape(-1).numpy()).cast("B")
        stride = tuple(turned.permute(2, 1, 0).stride()) if number % 2 else None
        blocks.append(Block(str(number), each, stride))
    mine = of(whole, wanted)
    flat = mine.permute(order).contiguous().reshape(-1)
    turned = mine.permute(order).contiguous().permute([order.index(d) for d in range(3)])
    for start, stop in ((0, len(flat)), (1, len(flat) - 1), (len(flat) // 2, len(flat) // 2 + 1)):
        into = np.empty(stop - start, np.int32)

        def read(key: str, at: int, part: memoryview) -> None:
            part[:] = memory[key][4 * at : 4 * at + part.nbytes]

        read_region(read, blocks, wanted, tuple(turned.stride()), 4, start, memoryview(into).cast("B"))
        assert into.tolist() == flat[start:stop].tolist()


@pytest.mark.parametrize(
    ("shape", "part", "most"),
    [
        ((64, 1000), [[(16, 32)], [(0, 1000)]], 1.0),  # rows: nothing else
        ((64, 100_000), [[(0, 64)], [(0, 50_000)]], 1.0),  # halves of long rows: no gap is read
        ((64, 100), [[(0, 64)], [(50, 50)]], 2.0),  # of short rows, which share blocks of checksums
    ],
)
def test_only_what_is_needed_is_read(shape: tuple[int, ...], part: list[Any], most: float) -> None:
    counted = []
    wanted = region(*part)
    size = 4 * int(np.prod(wanted.shape))
    read_region(
        lambda key, at, into: counted.append(into.nbytes),
        [Block("", Region.whole(shape), row_major(shape))],
        *(wanted, None, 4, 0, memoryview(bytearray(size))),
    )
    assert size <= sum(counted) <= most * size
    assert len(counted) == 1 or most == 1.0


def tensors() -> dict[str, Tensor]:
    torch.manual_seed(2)
    return {"w": torch.randn(5, 3), "t": torch.randn(3, 9).t(), "plain": torch.randn(4)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    synthetic.save(tmp_path / "a", tensors(), divided={"w": 0, "t": 0})
    return tmp_path / "a"


def test_blocks_are_one_tensor(path: Path, tmp_path: Path) -> None:
    with Checkpoint(path) as checkpoint:
        reader = TensorReader(checkpoint)
        for name, value in tensors().items():
            assert torch.equal(reader.whole(f"model/{name}"), value)
            assert reader.same(f"model/{name}", f"model/{name}")
        assert not reader.same("model/w", "model/t")
        with pytest.raises(zero.StateError, match=r"'model/w' is stored in blocks: model/w\[tp=0\]"):
            checkpoint.read("model/w", 0, memoryview(bytearray(4)))
    with open_source(path) as source:
        consolidate(source, tmp_path / "out", Options(workers=1, memory=2 * 147_456))


def test_memory_for_a_block_of_another_cut_is_small(tmp_path: Path) -> None:
    """Halves of rows into halves of columns, of 8 MiB."""
    value = torch.randn(1024, 2048)
    synthetic.save(tmp_path / "a", {"w": value}, divided={"w": 0})
    target, wanted = torch.empty(1024 * 1024), region([(0, 1024)], [(1024, 1024)])
    with Checkpoint(tmp_path / "a") as checkpoint:
        reader = TensorReader(checkpoint)
        reader.fill("model/w", target, 0, None, wanted)
        tracemalloc.start()
        reader.fill("model/w", target.zero_(), 0, None, wanted)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert torch.equal(target.view(1024, 1024), value[:, 1024:])
    assert peak < 3 << 20


def test_another_memory_order_is_not_read_for_each_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 MiB that are wanted transposed: read once, or once for each part of what may be staged."""
    value = torch.randn(1024, 2048)
    synthetic.save(tmp_path / "a", {"w": value, "divided": value}, divided={"divided": 0})
    with Checkpoint(tmp_path / "a") as checkpoint:
        reader = TensorReader(checkpoint)
        for key, staged, most in (("w", 8, 1), ("divided", 8, 1), ("w", 2, 4)):
            monkeypatch.setattr(tensor_reader, "TURNED", staged << 20)
            target, before = torch.empty(value.numel()), checkpoint.bytes_read
            reader.fill(f"model/{key}", target, 0, (1, 1024))
            assert torch.equal(target.view(2048, 1024), value.t())
            assert checkpoint.bytes_read - before <= most * value.nbytes


Change = Callable[[dict[str, Any]], None]


def parameter(manifest: dict[str, Any]) -> dict[str, Any]:
    return next(each for each in manifest["parameters"] if each["name"] == "w")


def first_run(*values: int) -> Change:
    def change(manifest: dict[str, Any]) -> None:
        parameter(manifest)["blocks"][0]["runs"][0] = [list(values)]

    return change


WRONG: dict[str, tuple[Change, str]] = {
    "a block is missing": (lambda m: parameter(m)["blocks"].pop(), r"'w' \(\[tp=0\]\) .* not all of it"),
    "a hole": (first_run(0, 1), "blocks of parameter 'w' .* overlap, or are not all of it"),
    "an overlap": (first_run(1, 2), "blocks of parameter 'w' .* overlap, or are not all of it"),
    "twice": (
        lambda m: parameter(m)["blocks"].append(parameter(m)["blocks"][0]),
        "blocks of parameter 'w' .* overlap",
    ),
    "beyond": (first_run(4, 2), r"block \[tp=0\] of parameter 'w' has indices beyond the shape \(5, 3\)"),
    "before": (first_run(-1, 3), r"block \[tp=0\] of parameter 'w' has indices beyond"),
    "nothing": (first_run(0, 0), r"block \[tp=0\] of parameter 'w' has indices beyond"),
    "another rank": (lambda m: parameter(m).update(shape=[5, 3, 1]), r"of parameter 'w' has 2 dimensions"),
    "no shape": (lambda m: parameter(m).update(shape=None), r"of parameter 'w' has 2 dimensions"),
    "another size": (lambda m: parameter(m).update(shape=[6, 3]), "blocks of parameter 'w' .* not all of it"),
    "no tensor": (lambda m: m["tensors"].pop("model/w[tp=1]"), r"tensor 'model/w\[tp=1\]' is missing"),
    "a size": (
        lambda m: m["tensors"]["model/w[tp=1]"].update(shape=[9, 1]),
        r"tensor 'model/w\[tp=1\]' has shape \(9, 1\) instead of \(3, 3\)",
    ),
    "a dtype": (
        lambda m: m["tensors"]["model/w[tp=1]"].update(dtype="I32"),
        "blocks of tensor 'model/w' have several dtypes",
    ),
    "a taken name": (
        lambda m: m["buffers"].append("w[tp=1]"),
        r"several tensors of the name 'w\[tp=1\]'",
    ),
    "too many": (
        lambda m: parameter(m)["blocks"][0].update(runs=[[[0, 1]] * 70, [[0, 1]] * 70]),
        "more than 4096 boxes",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_manifests_name_the_tensor(path: Path, what: str) -> None:
    change, told = WRONG[what]
    file = path / form.MANIFEST
    content = json.loads(form.unseal("zero-checkpoint", file.read_bytes()))
    change(content)
    file.write_bytes(form.seal("zero-checkpoint", content))
    with pytest.raises(zero.CorruptCheckpointError, match=told):
        Checkpoint(path)


def test_missing_files_of_a_place_are_named(path: Path) -> None:
    (path / "rank-00001.safetensors").unlink()
    with Checkpoint(path) as checkpoint:
        reader = TensorReader(checkpoint)
        with pytest.raises(zero.CheckpointError, match=r"rank-00001\.safetensors"):
            reader.whole("model/w")
