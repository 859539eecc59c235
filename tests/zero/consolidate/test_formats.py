"""What else can be read and written: safetensors, files of torch.save, universal checkpoints, zero's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import nn

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers import saved
from tests.zero.helpers.deepspeed_layout import Layout, Model, save, save_universal
from tests.zero.helpers.models import LanguageModel
from tests.zero.helpers.training import adamw
from zero.consolidate import Options, consolidate, convert, open_source, verify

pytestmark = pytest.mark.host


@pytest.fixture
def model() -> Model:
    torch.manual_seed(4)
    weights = {"embedding.weight": torch.randn(31, 17), "blocks.0.weight": torch.randn(700, 900)}
    others = {"blocks.0.bias": torch.randn(17), "empty": torch.empty(0, 3)}
    return Model(
        [weights, others],
        {"old": torch.randn(5, 3).bfloat16()},
        {"count": torch.tensor(3)},
        {"head.weight": "embedding.weight"},
    )


@pytest.mark.parametrize("limit", [10**9, 2000])
def test_torch_files(tmp_path: Path, model: Model, limit: int) -> None:
    save(tmp_path / "checkpoint", model, Layout(stage=2))
    options = Options(format="torch", max_shard_size=limit, verify=True)
    with open_source(tmp_path / "checkpoint") as source:
        result = consolidate(source, tmp_path / "out", options)
    found: saved.State = {}
    for name in result.files:
        found |= torch.load(tmp_path / "out" / name, weights_only=True, mmap=True)
    assert saved.same(found, model.expected())
    assert found["head.weight"].data_ptr() == found["embedding.weight"].data_ptr()
    if limit == 2000:
        index = json.loads((tmp_path / "out" / "pytorch_model.bin.index.json").read_text())
        assert sorted(index["weight_map"]) == sorted(found)
        assert sorted(set(index["weight_map"].values())) == sorted(result.files)
    else:
        assert result.files == ("pytorch_model.bin",)


@pytest.mark.parametrize("limit", [10**9, 2000])
def test_safetensors_are_read_as_they_are_written(tmp_path: Path, model: Model, limit: int) -> None:
    save(tmp_path / "checkpoint", model, Layout(stage=3))
    with open_source(tmp_path / "checkpoint") as source:
        consolidate(source, tmp_path / "first", Options(max_shard_size=limit))
    with open_source(tmp_path / "first") as source:
        consolidate(source, tmp_path / "second")
        assert source.facts["checksums"] == "none"
    assert saved.same(saved.read(tmp_path / "second"), model.expected())


def test_a_file_of_the_safetensors_library(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 5), "b": torch.arange(7), "c": torch.tensor(True)}
    save_file(tensors, tmp_path / "some.safetensors")
    with open_source(tmp_path / "some.safetensors") as source:
        consolidate(source, tmp_path / "out", Options(dtype="keep"))
    assert saved.same(saved.read(tmp_path / "out"), tensors)


def hostile(tmp_path: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = tmp_path / "hostile.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"[1]",
        b"[" * 10**6,
        {"a": entry([2], 0, 4)},
        {"a": entry([1], 4, 8)},
        {"a": entry([1], 0, 4), "b": entry([1], 2, 6)},
        {"a": entry([1 << 40, 1 << 40], 0, 4)},
        {"a": entry([-1, -1], 0, 4)},
        {"a": {"dtype": "F32"}},
        {"a": 3},
        {"__metadata__": [], "a": entry([1], 0, 4)},
        {"a": entry([2], 0, 8)},
        {"a": entry([7], 0, 4, "F4")},
    ],
)
def test_hostile_safetensors_are_refused(tmp_path: Path, header: object) -> None:
    with pytest.raises(zero.CorruptCheckpointError, match="hostile"):
        open_source(hostile(tmp_path, header, bytes(4)))


@pytest.mark.parametrize("dtype", ["F6_E2M3", "F31"])
def test_a_dtype_that_is_not_known_is_no_damage(tmp_path: Path, dtype: str) -> None:
    with pytest.raises(zero.CheckpointError, match=f"'a' is {dtype}; supported are F64") as caught:
        open_source(hostile(tmp_path, {"a": entry([1], 0, 4, dtype)}, bytes(4)))
    assert not isinstance(caught.value, zero.CorruptCheckpointError)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", 3, "missing.safetensors"])
def test_an_index_names_files_beside_it(tmp_path: Path, name: object) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(zero.CheckpointError, match=r"index|missing"):
        open_source(folder)


@pytest.mark.parametrize("stage", [2, 3])
def test_universal_checkpoints(tmp_path: Path, model: Model, stage: int) -> None:
    tag = save_universal(tmp_path / "runs", model, Layout(stage=stage))
    for path in (tag, tmp_path / "runs"):
        with open_source(path) as source:
            assert source.format == "DeepSpeed universal"
            assert verify(source) == []
            consolidate(source, tmp_path / "out", Options(overwrite=True))
        assert saved.same(saved.read(tmp_path / "out"), model.expected())
    for name, value in model.masters.items():  # in another shape, and column by column in memory
        if value.dim() == 2 and value.numel():
            turned = value.reshape(value.shape[::-1]).t().contiguous().t()
            torch.save(turned, tag / "zero" / name / "fp32.pt")
    with open_source(tag) as source:
        consolidate(source, tmp_path / "out", Options(overwrite=True))
    assert saved.same(saved.read(tmp_path / "out"), model.expected())
    (tag / "zero" / "blocks.0.bias" / "fp32.pt").unlink()
    with pytest.raises(zero.CheckpointError, match=r"blocks\.0\.bias"):
        open_source(tag)


def load(context: Context, path: str, stage: int) -> dict[str, torch.Tensor]:
    """A fresh engine, with the weights of a checkpoint."""
    torch.manual_seed(99)
    model = LanguageModel()
    engine = zero.initialize(model, adamw(model), zero.Config(stage=stage, precision="bf16", timeout=10))
    engine.load_checkpoint(path, weights_only=True)
    return engine.state_dict(master=True)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_job_begins_with_converted_weights(cluster: Clusters, tmp_path: Path, ranks: int) -> None:
    torch.manual_seed(5)
    model: nn.Module = LanguageModel()
    save_model(model, str(tmp_path / "model.safetensors"))
    with open_source(tmp_path / "model.safetensors") as source:
        convert(source, tmp_path / "checkpoint", Options(dtype="stored", workers=2, verify=True))
    with open_source(tmp_path / "checkpoint") as source:
        assert source.format == "zero"
        assert verify(source) == []
    state = cluster(ranks).run(load, path=str(tmp_path / "checkpoint"), stage=3)[0]
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
    expected = {n: v.bfloat16() if n in frozen else v for n, v in model.state_dict().items()}
    assert saved.same(state, expected)


def test_converted_masters_stay_wide(tmp_path: Path, model: Model) -> None:
    save(tmp_path / "deepspeed", model, Layout(stage=3))
    with open_source(tmp_path / "deepspeed") as source:
        convert(source, tmp_path / "checkpoint")
    with open_source(tmp_path / "checkpoint") as source:
        kinds = {t.name: (t.dtype, t.training_dtype, t.kind) for t in source.tensors}
        assert kinds["embedding.weight"] == ("F32", "BF16", "parameter")
        assert kinds["old"] == ("BF16", "BF16", "frozen")
        assert kinds["count"] == ("I64", "I64", "buffer")
        consolidate(source, tmp_path / "out")
    assert saved.same(saved.read(tmp_path / "out"), model.expected())
    with open_source(tmp_path / "deepspeed") as source, pytest.raises(zero.CheckpointError, match="exists"):
        convert(source, tmp_path / "checkpoint")
