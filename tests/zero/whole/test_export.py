"""Whole weights in a folder: what is in the files, what they replace, and disks and ranks that fail."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.loops import train_on
from tests.zero.helpers.models import LanguageModel, fresh, language_loss
from tests.zero.helpers.told import raised
from tests.zero.helpers.training import adamw
from zero.files.storage import File, Storage

TIMEOUT = 3.0  # seconds
SHARD = 2000  # bytes: several files
State = dict[str, Tensor]


def read(folder: str) -> State:
    files = sorted(Path(folder).glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def trained(context: Context, **settings: object) -> zero.Engine:
    model = fresh()
    engine = zero.initialize(model, adamw(model), zero.Config(**{"timeout": 10} | settings))
    train_on(engine, language_loss(model, 0, context.rank))
    return engine


def saved_state(engine: zero.Engine) -> State:
    return {name: value for name, value in engine.state_dict().items() if name != "head.weight"}  # tied


def same(found: State, wanted: State) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def written_body(context: Context, folder: str) -> None:
    for stage, precision, dtypes in (
        (3, "bf16", (None, torch.float32, torch.bfloat16)),
        (2, "fp32", (None, torch.bfloat16)),
    ):
        engine = trained(context, stage=stage, precision=precision)
        for dtype in dtypes:
            path = f"{folder}/{stage}-{dtype}"
            engine.save_pretrained(path, dtype=dtype, max_shard_size=SHARD)
            wanted = engine.state_dict(master=dtype is not None)
            if context.rank:
                continue
            del wanted["head.weight"]  # tied to the embedding
            wanted = {n: t.to(dtype) if dtype else t for n, t in wanted.items()}
            assert same(read(path), wanted)
            index = json.loads(Path(path, "model.safetensors.index.json").read_text())
            assert index["weight_map"].keys() == wanted.keys()
    model = LanguageModel()
    zero.load_pretrained(model, f"{folder}/2-None")
    assert all(torch.equal(v, engine.full_master(n).cpu()) for n, v in model.named_parameters())


def test_files_have_every_weight_once(cluster: Clusters, tmp_path: Path) -> None:
    cluster(2).run(written_body, folder=str(tmp_path))


class Full(Storage):
    """A disk that has room until the `left`-th write."""

    def __init__(self, left: int) -> None:
        self.left = left

    def create(self, path: Path, size: int, direct: bool = False) -> File:
        return Watched(super().create(path, size, direct), self)

    def use(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Watched:
    def __init__(self, file: File, disk: Full) -> None:
        self._file, self._disk = file, disk

    def __getattr__(self, name: str) -> object:
        if name in ("write", "sync"):
            self._disk.use()
        return getattr(self._file, name)


def failing_body(context: Context, folder: str) -> list[str]:
    """The messages of a disk that is full early, in the middle and late."""
    engine = trained(context, stage=3)
    path = f"{folder}/weights"
    engine.save_pretrained(path)
    before, messages, sound = read(path), [], engine._checkpoints.storage
    train_on(engine, language_loss(engine.module, 1, context.rank))
    for left in (0, 2, 6):
        engine._checkpoints.storage = Full(left)
        messages.append(raised(lambda: engine.save_pretrained(path, max_shard_size=SHARD)))
        if context.rank == 0:  # the other may be told first
            assert sorted(os.listdir(folder)) == ["weights"]
            assert same(read(path), before)
    engine._checkpoints.storage = sound
    if context.rank == 0:
        Path(path, "notes.txt").write_text("kept")
    engine.save_pretrained(path, max_shard_size=SHARD)
    if context.rank == 0:
        assert not Path(path, "model.safetensors").exists()
        assert not same(read(path), before)
        assert Path(path, "notes.txt").read_text() == "kept"
        Path(path, "checkpoint-1").mkdir()
    engine.save_pretrained(path)
    names = ["checkpoint-1", "model.safetensors", "notes.txt"]
    assert sorted(os.listdir(path)) == names
    assert os.listdir(folder) == ["weights"]
    return messages


def test_a_full_disk_leaves_what_was_there(cluster: Clusters, tmp_path: Path) -> None:
    for messages in cluster(2).run(failing_body, folder=str(tmp_path)):
        assert all(m.startswith("CheckpointError") and "No space left" in m for m in messages)


def interrupted_body(context: Context, folder: str) -> str:
    engine = trained(context, stage=3, timeout=TIMEOUT)
    if context.rank:
        engine._full_parameters.gather = broken  # type: ignore[method-assign]
    return raised(lambda: engine.save_pretrained(f"{folder}/weights"))


def broken(*_: object) -> Tensor:
    raise zero.ModelError("this rank cannot go on")


def test_a_rank_that_fails_leaves_no_half_folder(cluster: Clusters, tmp_path: Path) -> None:
    first, second = cluster(2).run(interrupted_body, folder=str(tmp_path))
    assert first.startswith("CommunicationError")
    assert second.startswith("ModelError")
    assert not os.listdir(tmp_path)


def leaving_body(context: Context, folder: str) -> float:
    """When rank 1 has its last answer, and when rank 0, with which all answers may end, returns."""
    engine = trained(context, stage=3)
    communicator, heard = engine._full_parameters.communicator, []
    answers = communicator.everywhere

    def late(value: object) -> list[object]:
        found = answers(value)
        time.sleep(0.1 * context.rank)
        heard.append(time.monotonic())
        return found

    communicator.everywhere = late  # type: ignore[method-assign]
    engine.save_pretrained(f"{folder}/weights")
    return heard[-1] if context.rank else time.monotonic()


def test_rank_0_does_not_leave_before_others_have_their_answers(cluster: Clusters, tmp_path: Path) -> None:
    first, second = cluster(2).run(leaving_body, folder=str(tmp_path))
    assert second < first


def test_what_cannot_be_saved_is_told(tmp_path: Path) -> None:
    model = fresh()
    engine = zero.initialize(model, adamw(model), zero.Config())
    with pytest.raises(zero.UsageError, match=r"dtype=torch\.int8"):
        engine.save_pretrained(tmp_path / "a", dtype=torch.int8)
    (tmp_path / "file").write_text("")
    with pytest.raises(zero.CheckpointError, match="Not a directory"):
        engine.save_pretrained(tmp_path / "file" / "c")
    engine.save_pretrained(tmp_path / "a" / "b" / "c")
    assert same(read(str(tmp_path / "a" / "b" / "c")), saved_state(engine))
