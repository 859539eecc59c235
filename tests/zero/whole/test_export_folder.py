"""What weights and adapters replace in a folder, and what stays there, in whatever way files get there."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from zero.consolidate.publish import Staging
from zero.files.storage import DISK, Storage

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")


def put(out: Path, *names: str, storage: Storage = DISK) -> None:
    """Write files of these names to a folder, as engine.save_pretrained does."""
    staging = Staging(storage, out, overwrite=True, among_others=True)
    staging.begin(os.urandom(16))
    try:
        for name in names:
            (staging.path / name).parent.mkdir(exist_ok=True)
            (staging.path / name).write_text("new")
        staging.commit()
    except OSError:
        staging.abandon()
        raise
    staging.release()


def held(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_text() for path in files}


def old(folder: Path, *names: str) -> dict[str, str]:
    """A folder that holds files of these names."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("old")
    return dict.fromkeys(names, "old")


def new(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "new")


@pytest.mark.parametrize("others", [(), ("notes.txt",), ("checkpoint-1/model.safetensors",)])
def test_weights_and_adapters_replace_their_own_kind(tmp_path: Path, others: tuple[str, ...]) -> None:
    out = tmp_path / "out"
    there = old(out, *SHARDS, INDEX, "adapter_model.bin", "b/adapter_model.bin", *others)
    put(out, *ADAPTER, "b/adapter_model.safetensors")
    del there["adapter_model.bin"], there["b/adapter_model.bin"]
    there |= new(*ADAPTER, "b/adapter_model.safetensors")
    assert held(out) == there
    put(out, "config.json", "model.safetensors")
    for name in (*SHARDS, INDEX):
        del there[name]
    assert held(out) == there | new("config.json", "model.safetensors")
    assert os.listdir(tmp_path) == ["out"]


def test_shards_of_an_older_model_go(tmp_path: Path) -> None:
    old(tmp_path / "out", "model-00003-of-00003.safetensors", INDEX, "config.json")
    put(tmp_path / "out", "config.json", *SHARDS, INDEX)
    assert held(tmp_path / "out") == new("config.json", *SHARDS, INDEX)


class Refusing(Storage):
    """Renames no directory, and fails at the `at`-th file that moves to another one."""

    def __init__(self, at: int) -> None:
        self.left = at

    def exchange(self, first: Path, second: Path) -> bool:
        return False

    def rename(self, old: Path, new: Path) -> None:
        if old.is_dir():
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        self.left -= 1
        if self.left == 0:
            raise OSError(errno.EIO, "injected")
        super().rename(old, new)


@pytest.mark.parametrize("folder", ["there", "new/folder"])
def test_an_error_between_files_brings_back_what_was_there(tmp_path: Path, folder: str) -> None:
    there = old(tmp_path / "there", *SHARDS, INDEX, "config.json", "notes.txt")
    names = ("config.json", "b/adapter_model.safetensors", "model.safetensors")
    moves = 3 if folder != "there" else 7
    for at in range(1, moves + 1):
        with pytest.raises(OSError, match="injected"):
            put(tmp_path / folder, *names, storage=Refusing(at))
        assert held(tmp_path) == {f"there/{name}": "old" for name in there}
        assert os.listdir(tmp_path) == ["there"]
    put(tmp_path / folder, *names, storage=Refusing(moves + 1))
    kept = {"notes.txt": "old"} if folder == "there" else {}
    assert held(tmp_path / folder) == kept | new(*names)


@pytest.mark.parametrize("names", [(), ("model.safetensors",), ("notes.txt",)])
def test_a_working_directory_stays_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    old(out, *names)
    monkeypatch.chdir(out)
    inode = out.stat().st_ino
    put(Path(), "model.safetensors")
    assert os.listdir()  # of the directory that the process stands in
    assert out.stat().st_ino == inode
    assert held(Path())["model.safetensors"] == "new"


def test_a_folder_that_others_write_to_stays_the_same(tmp_path: Path) -> None:
    out = tmp_path / "out"
    old(out, "notes.txt", "model.safetensors")
    inode = out.stat().st_ino
    put(out, "model.safetensors")
    assert out.stat().st_ino == inode
    assert held(out) == {"notes.txt": "old", "model.safetensors": "new"}
