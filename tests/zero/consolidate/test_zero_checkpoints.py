"""Consolidating zero's own checkpoints: exactly the engine's state, whatever wrote it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import zero
from accelz.conformance.cluster import Clusters
from tests.zero.helpers import saved
from zero.consolidate import Options, consolidate, open_source, verify
from zero.files.reader import Checkpoint

pytestmark = pytest.mark.host

Saved = Callable[..., Path]
SMALL = Options(workers=3, memory=3 * 147_456)  # the smallest chunks there are
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture(scope="module")
def checkpoint(cluster: Clusters, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """`checkpoint(ranks, precision, stage)` is a folder with a checkpoint and what it has to be equal to."""
    made: dict[tuple[int, str, int], Path] = {}

    def make(ranks: int, precision: str = "bf16", stage: int = 3) -> Path:
        key = (ranks, precision, stage)
        if key not in made:
            folder = tmp_path_factory.mktemp("saved")
            cluster(ranks).run(saved.save, folder=str(folder), precision=precision, stage=stage)
            made[key] = folder
        return made[key]

    return make


def run(folder: Path, out: Path, options: Options = SMALL) -> saved.State:
    with open_source(folder) as source:
        consolidate(source, out, options)
    return saved.read(out)


@pytest.mark.parametrize(
    ("ranks", "precision", "stage"),
    [(1, "bf16", 3), (2, "bf16", 3), (3, "bf16", 3), (2, "fp32", 2), (3, "fp32", 3), (2, "bf16", 0)],
)
def test_masters_are_those_of_the_engine(
    checkpoint: Saved, tmp_path: Path, ranks: int, precision: str, stage: int
) -> None:
    folder = checkpoint(ranks, precision, stage)
    found = run(folder, tmp_path / "out")
    assert saved.same(found, saved.cast(saved.expected(folder, master=True), torch.float32))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_casts_round_the_masters(checkpoint: Saved, tmp_path: Path, dtype: str) -> None:
    folder = checkpoint(2)
    found = run(folder, tmp_path / "out", Options(dtype=dtype, workers=2))  # type: ignore[arg-type]
    assert saved.same(found, saved.cast(saved.expected(folder, master=True), DTYPES[dtype]))


def test_keep_is_the_weights_as_they_were_in_training(checkpoint: Saved, tmp_path: Path) -> None:
    folder = checkpoint(3)
    found = run(folder, tmp_path / "out", Options(dtype="keep"))
    assert saved.same(found, saved.expected(folder, master=False))


def test_shards_are_those_of_transformers(checkpoint: Saved, tmp_path: Path) -> None:
    folder = checkpoint(2)
    out = tmp_path / "out"
    found = run(folder, out, Options(max_shard_size=3000))
    assert saved.same(found, saved.cast(saved.expected(folder, master=True), torch.float32))
    files = sorted(p.name for p in out.glob("*.safetensors"))
    count = len(files)
    assert count > 2
    assert files == [f"model-{n + 1:05d}-of-{count:05d}.safetensors" for n in range(count)]
    places = saved.weight_map(out)
    assert sorted(set(places.values())) == files
    assert sorted([*places, "head.weight"]) == sorted(found)  # tied: stored once


def test_the_model_loads_it_with_safetensors(checkpoint: Saved, tmp_path: Path) -> None:
    from safetensors.torch import load_model

    from tests.zero.helpers.models import LanguageModel

    folder = checkpoint(2)
    run(folder, tmp_path / "out")
    model = LanguageModel()
    missing, unexpected = load_model(model, tmp_path / "out" / "model.safetensors")
    assert not missing
    assert not unexpected
    assert saved.same(model.state_dict(), saved.cast(saved.expected(folder, master=True), torch.float32))


def test_names_are_chosen_by_patterns(checkpoint: Saved, tmp_path: Path) -> None:
    folder = checkpoint(2)
    options = Options(include=("blocks.*", "head.*"), exclude=("*.bias",))
    found = run(folder, tmp_path / "out", options)
    wanted = saved.cast(saved.expected(folder, master=True), torch.float32)
    wanted = {n: v for n, v in wanted.items() if re.match(r"blocks|head", n) and not n.endswith("bias")}
    assert saved.same(found, wanted)
    assert "head.weight" in found
    with open_source(folder) as source:
        with pytest.raises(zero.UsageError, match=r"no tensor name matches 'nothing\.\*'"):
            consolidate(source, tmp_path / "other", Options(exclude=("nothing.*",)))
        with pytest.raises(zero.UsageError, match="no tensors are left"):
            consolidate(source, tmp_path / "other", Options(exclude=("*",)))


def test_damage_in_the_source_is_named_and_nothing_is_left(checkpoint: Saved, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    _copy(checkpoint(2) / "checkpoint", folder)
    with open_source(folder) as source:
        assert verify(source) == []
    with Checkpoint(folder) as opened:
        piece = opened.tensor("model/blocks.2.up.weight").slices[0]
        file = folder / opened.manifest.files[piece.file].name
    data = bytearray(file.read_bytes())
    data[piece.offset + 5] ^= 4
    file.write_bytes(data)
    with open_source(folder) as source:
        (problem,) = verify(source)
        assert file.name in problem
        with pytest.raises(zero.CorruptCheckpointError, match=rf"{file.name}.*'model/blocks\.2\.up"):
            consolidate(source, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["damaged"]


def _copy(source: Path, target: Path) -> None:
    target.mkdir()
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
