"""Only regular files are opened, and small files are read only if they are small."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import zero
from tests.zero.helpers import deepspeed_layout, synthetic
from zero.consolidate import open_source
from zero.files import manifest as form
from zero.files.manifest_assembly import assemble
from zero.files.storage import DISK, read_whole

pytestmark = pytest.mark.timeout(20)  # a pipe would block
SPARSE = 6 << 30


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    synthetic.save(tmp_path / "runs" / "step-7", {"scale": torch.ones(3)})
    latest = form.Latest(checkpoint="step-7", rotation=())
    (tmp_path / "runs" / "latest").write_bytes(form.seal("zero-latest", latest))
    return tmp_path / "runs"


def pipe(path: Path) -> None:
    os.mkfifo(path)


def zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def bound_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # names of sockets are short
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(here)


@pytest.mark.parametrize("make", [pipe, zeros, bound_socket, Path.mkdir])
@pytest.mark.parametrize("name", ["latest", "step-7/manifest.json", "step-7/rank-00000.safetensors"])
def test_what_is_no_file_is_refused(runs: Path, name: str, make: Callable[[Path], None]) -> None:
    (runs / name).unlink()
    make(runs / name)
    with pytest.raises(zero.CheckpointError, match=r"pipe|[Dd]irectory"):
        open_source(runs)


@pytest.mark.parametrize("name", ["latest", "step-7/manifest.json"])
def test_small_files_are_small(runs: Path, name: str) -> None:
    os.truncate(runs / name, SPARSE)
    with pytest.raises(zero.CheckpointError, match="at most"):
        open_source(runs)


def test_files_of_other_formats_are_files_too(tmp_path: Path) -> None:
    cases = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", ".metadata")
    for make in (pipe, zeros):
        for name in cases:
            folder = tmp_path / "model"
            folder.mkdir()
            make(folder / name)
            with pytest.raises(zero.CheckpointError):
                open_source(folder)
            shutil.rmtree(folder)


@pytest.mark.parametrize("name", ["model.safetensors.index.json", ".metadata"])
def test_what_describes_others_is_small(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    os.truncate(tmp_path / name, SPARSE)
    with pytest.raises(zero.CheckpointError, match="at most"):
        open_source(tmp_path)


@pytest.mark.parametrize("make", [pipe, zeros])
def test_deepspeed_s_latest_is_a_file(tmp_path: Path, make: Callable[[Path], None]) -> None:
    model = deepspeed_layout.Model([{"w": torch.ones(3)}])
    deepspeed_layout.save(tmp_path / "runs", model, deepspeed_layout.Layout())
    (tmp_path / "runs" / "latest").unlink()
    make(tmp_path / "runs" / "latest")
    with pytest.raises(zero.CheckpointError):
        open_source(tmp_path / "runs")


def test_a_table_of_checksums_or_a_header_claims_no_memory(runs: Path) -> None:
    path = runs / "step-7" / "rank-00000.safetensors"
    os.truncate(path, SPARSE)
    data = form.unseal("zero-checkpoint", (runs / "step-7" / "manifest.json").read_bytes())
    size = f'"bytes":{SPARSE},'.encode()
    start = data.index(b'"bytes":', data.index(b'"files"'))
    data = data[:start] + size + data[data.index(b",", start) + 1 :]
    kept = form.Manifest.model_validate_json(data)
    (runs / "step-7" / "manifest.json").write_bytes(form.seal("zero-checkpoint", kept))
    with open_source(runs) as source:
        chunk = next(source.everything(1 << 16))
        with pytest.raises(zero.CorruptCheckpointError, match="cannot be as large"):
            chunk.read(memoryview(bytearray(1 << 20)))


def test_no_manifest_is_published_that_would_not_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zero.files.manifest_assembly.LARGEST_MANIFEST", 100)
    with pytest.raises(zero.CheckpointError, match="at most 100 are read"):
        assemble({"parameters": [], "state": "x" * 100}, [])


def test_a_small_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "some").write_bytes(b"abc")
    assert read_whole(DISK, tmp_path / "some", 3) == b"abc"
    with pytest.raises(OSError, match="at most 2"):
        read_whole(DISK, tmp_path / "some", 2)
