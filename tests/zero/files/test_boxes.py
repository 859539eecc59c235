"""Tensors in another memory order: the same values, however small the boxes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.zero.helpers import saved, synthetic
from zero.consolidate import Options, consolidate, open_source
from zero.files.boxes import Block, Region
from zero.sources.assembled import assembled
from zero.sources.record_source import RecordSource
from zero.sources.source import Fragment

SHAPE = (3, 4, 5, 2)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (0, 2, 3, 1), (1, 0, 3, 2)])
@pytest.mark.parametrize("limit", [1, 3, 7, 10, 24, 1000])
def test_chunks_are_the_whole_tensor_in_order(order: tuple[int, ...], limit: int) -> None:
    inverse = sorted(range(4), key=order.__getitem__)
    tensor = torch.arange(120, dtype=torch.int32).view([SHAPE[d] for d in order]).permute(inverse)
    assert tuple(tensor.shape) == SHAPE
    in_memory = memoryview(tensor.permute(order).contiguous().view(-1).numpy()).cast("B")

    def read(_: None, start: int, into: memoryview) -> None:
        into[:] = in_memory[4 * start : 4 * start + into.nbytes]

    whole = bytearray()
    blocks = [Block(None, Region.whole(SHAPE), tuple(tensor.stride()))]
    for chunk in assembled(0, SHAPE, blocks, read, 4, 3 * 4 * limit, gap=0):
        assert chunk.nbytes <= 4 * limit
        assert chunk.pieces == (Fragment(0, len(whole) // 4, chunk.nbytes // 4, 0),)
        whole += chunk.read(memoryview(bytearray(4 * limit)))
    assert torch.equal(torch.frombuffer(whole, dtype=torch.int32).view(SHAPE), tensor)


def test_transposed_and_channels_last_tensors_larger_than_a_chunk(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {
        "transposed": torch.randn(300, 700).t(),
        "channels_last": torch.randn(40, 30, 9, 9).to(memory_format=torch.channels_last),
        "plain": torch.randn(70_001),
        "number": torch.tensor(2.5),
    }
    synthetic.save(tmp_path / "checkpoint", tensors, ranks=3)
    with open_source(tmp_path / "checkpoint") as source:
        result = consolidate(source, tmp_path / "out", Options(workers=2, memory=2 * 147_456, verify=True))
    assert saved.same(saved.read(tmp_path / "out"), tensors)
    assert result.left_out == ("head._extra_state",)


def test_files_without_checksums_of_blocks_are_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In many chunks, of which each has a part of every column."""
    counted, read = [], RecordSource._read_part

    def counting(source: Any, item: int, part: Any, start: int, into: memoryview) -> None:
        counted.append(into.nbytes)
        read(source, item, part, start, into)

    monkeypatch.setattr(RecordSource, "_read_part", counting)
    tensors = {"transposed": torch.randn(300, 700).t()}
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    with open_source(tmp_path / "pytorch_model.bin") as source:
        consolidate(source, tmp_path / "out", Options(workers=2, memory=2 * 147_456))
    assert saved.same(saved.read(tmp_path / "out"), tensors)
    assert sum(counted) == 4 * 300 * 700
