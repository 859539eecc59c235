"""Weights in files of torch.save: what users and torch write, and nothing in them is ever run."""

from __future__ import annotations

import json
import pickle
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero
from tests.zero.helpers import saved
from tests.zero.helpers.bomb import Bomb
from zero.consolidate import Options, consolidate, convert, open_source, verify
from zero.sources import torch_weights

KEEP = Options(dtype="keep", workers=2)


def read(path: Path, out: Path, options: Options = KEEP) -> saved.State:
    with open_source(path) as source:
        assert source.format == "torch.save"
        consolidate(source, out, options)
    return saved.read(out)


def tensors() -> saved.State:
    torch.manual_seed(9)
    flat = torch.randn(1000)
    tied = torch.randn(40, 30)
    return {
        "tied": tied,
        "again": tied,
        "turned": tied.t(),
        "first": flat[:600].view(20, 30),
        "second": flat[600:],
        "across": flat[500:700],
        "half": torch.randn(7).half(),
        "count": torch.tensor(3),
        "empty": torch.empty(0, 3),
        "nothing": torch.empty(0, 3),
    }


def test_a_state_dict(tmp_path: Path) -> None:
    torch.save(tensors(), tmp_path / "model.pt")
    assert saved.same(read(tmp_path / "model.pt", tmp_path / "out"), tensors())
    with open_source(tmp_path / "model.pt") as source:
        assert verify(source) == []
        assert [t.aliases for t in source.tensors if t.name == "tied"] == [("again",)]
        assert source.facts["checksums"] == "of each record"


def test_a_module_s_and_what_jobs_save_beside_it(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    model[0].to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    optimizer.step()
    whole = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "args": Namespace(lr=0.1),
        "epoch": 3,
    }
    torch.save(whole, tmp_path / "last.ckpt")
    found = read(tmp_path / "last.ckpt", tmp_path / "out", Options(dtype="keep", include=("model.*",)))
    assert saved.same({name.removeprefix("model."): v for name, v in found.items()}, model.state_dict())
    with open_source(tmp_path / "last.ckpt") as source:
        assert {"optimizer.state.0.exp_avg", "optimizer.state.3.step"} <= {t.name for t in source.tensors}
        assert {"args", "epoch", "optimizer.param_groups.0.lr"} <= set(source.left_out)


@pytest.mark.parametrize("limit", [10**9, 2000])
def test_a_model_s_directory_as_it_is_written(tmp_path: Path, limit: int) -> None:
    torch.save(tensors(), tmp_path / "model.pt")
    with open_source(tmp_path / "model.pt") as source:
        consolidate(source, tmp_path / "bin", Options(dtype="keep", format="torch", max_shard_size=limit))
    assert (tmp_path / "bin" / torch_weights.LAYOUT.index).exists() == (limit == 2000)
    assert saved.same(read(tmp_path / "bin", tmp_path / "out"), tensors())


def test_a_job_begins_with_them(tmp_path: Path) -> None:
    model = nn.Linear(5, 3)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    with open_source(tmp_path / "model.pt") as source:
        consolidate(source, tmp_path / "weights")
        convert(source, tmp_path / "checkpoint")
    for load in (
        lambda other: zero.load_pretrained(other, tmp_path / "weights"),
        lambda other: zero.initialize(other, torch.optim.SGD(other.parameters())).load_checkpoint(
            tmp_path / "checkpoint", weights_only=True
        ),
    ):
        other = nn.Linear(5, 3)
        load(other)
        assert torch.equal(other.weight, model.weight)
    with pytest.raises(zero.CheckpointError, match="zero consolidate"):
        zero.load_pretrained(nn.Linear(5, 3), tmp_path / "model.pt")


def test_flipped_bits_are_found(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save(tensors(), path)
    data = bytearray(path.read_bytes())
    data[data.find(tensors()["tied"].numpy().tobytes()) + 9] ^= 16
    path.write_bytes(data)
    with pytest.raises(zero.CorruptCheckpointError, match=r"model\.pt.*'tied'"):
        read(path, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.pt"]


class Wrapped:
    """An object of a job's, with weights in it."""

    def __init__(self) -> None:
        self.weights = torch.ones(3)


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value, value]
    return value


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (lambda: nn.Linear(2, 2), "Linear. Save state dicts"),
        (lambda: {"a": torch.ones(2), "ema": Wrapped()}, "Wrapped. Save state dicts"),
        (lambda: torch.ones(2), "no named tensors"),
        (lambda: {"epoch": 3}, "no named tensors"),
        (lambda: {"a": {"b": torch.ones(2)}, "a.b": torch.zeros(2)}, "same name"),
        (lambda: {"a": torch.ones(2).to_sparse()}, "Save state dicts"),
        (lambda: {"a": torch.ones(2), "deep": nested(30)}, "more than"),
    ],
)
def test_what_is_no_state_dict_is_refused(
    tmp_path: Path, content: Callable[[], Any], error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_weights, "_MOST_LEAVES", 1000)
    torch.save(content(), tmp_path / "model.pt")
    with pytest.raises(zero.CheckpointError, match=error):
        open_source(tmp_path / "model.pt")


def test_nothing_is_run(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2), "bomb": Bomb(str(tmp_path / "ran"))}, tmp_path / "model.pt")
    assert list(read(tmp_path / "model.pt", tmp_path / "out")) == ["a"]
    assert not (tmp_path / "ran").exists()


def test_other_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "old.pt").write_bytes(pickle.dumps({"a": 3}))
    (tmp_path / "cut.pt").write_bytes(b"")
    for name in ("old.pt", "cut.pt"):
        with pytest.raises(
            zero.CorruptCheckpointError, match=rf"{name} is truncated or not a torch\.save file"
        ):
            open_source(tmp_path / name)


def shards(folder: Path, parts: dict[str, dict[str, Tensor]], weight_map: dict[str, str]) -> Path:
    folder.mkdir()
    for file, state in parts.items():
        torch.save(state, folder / file)
    (folder / torch_weights.LAYOUT.index).write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_an_index_is_checked(tmp_path: Path) -> None:
    a, b = {"a": torch.ones(2)}, {"b": torch.zeros(3)}
    good = shards(tmp_path / "good", {"1.bin": a, "2.bin": b}, {"a": "1.bin", "b": "2.bin"})
    assert saved.same(read(good, tmp_path / "out"), {**a, **b})
    wrong = shards(tmp_path / "wrong", {"1.bin": a, "2.bin": b}, {"a": "2.bin", "b": "2.bin"})
    twice = shards(tmp_path / "twice", {"1.bin": a, "2.bin": {**a, **b}}, {"a": "1.bin", "b": "2.bin"})
    missing = shards(tmp_path / "missing", {"1.bin": a}, {"a": "1.bin", "b": "2.bin"})
    for folder, error in ((wrong, "'a' is in 2.bin"), (twice, "two files"), (missing, r"2\.bin is missing")):
        with pytest.raises(zero.CheckpointError, match=error):
            open_source(folder)
