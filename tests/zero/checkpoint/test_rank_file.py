"""A rank's file from tensors where they lie, and from a packed copy of them: the same bytes."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from accelz.conformance.cluster import Clusters, Context
from zero.checkpoint.rank_file import Part, pack, write_rank_file
from zero.errors import CheckpointError
from zero.files import rank_layout
from zero.files.manifest import CHECKSUM_BLOCK
from zero.files.rank_layout import RankLayout, Stretch
from zero.files.storage import DISK, PAGE
from zero.files.stream import CHUNK

DTYPES = (torch.uint8, torch.float32, torch.bfloat16, torch.int64)


def parts_of(context: Context, sizes: list[int]) -> list[Part]:
    generator = torch.Generator().manual_seed(len(sizes))
    found = []
    for number, size in enumerate(sizes):
        dtype = DTYPES[number % len(DTYPES)]
        values = torch.randint(0, 200, (size,), generator=generator).to(dtype)
        found.append(Part(f"model/{number}", (size,), values.to(context.accelerator.device)))
    return found


def files_body(context: Context, folder: str, all_sizes: list[list[int]]) -> list[str]:
    """What differs, by file. The arena of one save serves the next."""
    arena, problems = None, []
    for number, sizes in enumerate(all_sizes):
        parts = parts_of(context, sizes)
        plain, packed = (Path(folder, f"{number}-{kind}", "rank.safetensors") for kind in ("plain", "packed"))
        for path in (plain, packed):
            path.parent.mkdir()
        first = write_rank_file(DISK, context.accelerator, plain, parts)
        copies, arena = pack(context.accelerator, parts, arena)
        for part in parts:
            part.values.zero_()
        second = write_rank_file(DISK, context.accelerator, packed, copies, threads=False)
        if json.dumps(first, sort_keys=True) != json.dumps(second, sort_keys=True):
            problems.append(f"{number}: other reports")
        if plain.read_bytes() != packed.read_bytes():
            problems.append(f"{number}: other bytes")
        if set(load_file(plain)) != {"checksums", *(part.key for part in parts)}:
            problems.append(f"{number}: other names")
    return problems


@pytest.mark.parametrize("seed", range(3))
def test_packed_or_not_the_bytes_are_the_same(cluster: Clusters, tmp_path: Path, seed: int) -> None:
    generator = random.Random(seed)
    sizes = [
        [],
        [0, 1, 0],
        [CHECKSUM_BLOCK, CHECKSUM_BLOCK + 1, 3, PAGE],
        [generator.randrange(CHUNK) for _ in range(5)],
        [CHUNK // 4] * 6,
        [generator.randrange(3 * CHECKSUM_BLOCK) for _ in range(40)],
    ]
    assert cluster(1).run(files_body, folder=str(tmp_path), all_sizes=sizes) == [[]]


@pytest.mark.parametrize(("numel", "count"), [(1 << 42, 1), (1, 200)])
def test_files_that_nobody_would_read_are_refused(
    numel: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_layout, "LONGEST_HEADER", 2 * PAGE)
    with pytest.raises(CheckpointError, match="save from more ranks"):
        RankLayout(Stretch(f"model/{n}", "F32", (numel,), numel) for n in range(count))
