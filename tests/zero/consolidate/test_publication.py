"""The output appears whole or not at all: kills, full disks, what is in the way, memory."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

import zero
from tests.zero.helpers import saved, synthetic
from zero.consolidate import Options, consolidate, convert, open_source
from zero.consolidate.universal import export_universal
from zero.files.storage import File, Storage
from zero.sources.zero_checkpoint import ZeroSource

TENSORS = 8
SHARD = 400_000  # bytes: one tensor in a file


@pytest.fixture(scope="module")
def model() -> saved.State:
    torch.manual_seed(1)
    return {f"layers.{n}.weight": torch.randn(256, 300) for n in range(TENSORS)}


@pytest.fixture
def checkpoint(tmp_path: Path, model: saved.State) -> Path:
    synthetic.save(tmp_path / "checkpoint", model)
    return tmp_path / "checkpoint"


def run(checkpoint: Path, out: Path, options: Options | None = None, storage: Storage | None = None) -> None:
    with open_source(checkpoint) as source:
        consolidate(source, out, options or Options(max_shard_size=SHARD), storage=storage or Storage())


class Failing(Storage):
    """Raises an error of the system at the `at`-th creation, write, sync or rename."""

    def __init__(self, at: int, code: int = errno.ENOSPC) -> None:
        self.at = at
        self.calls = 0
        self.code = code

    def step(self) -> None:
        self.calls += 1
        if self.calls == self.at:
            raise OSError(self.code, os.strerror(self.code))

    def create(self, path: Path, size: int, direct: bool = False) -> File:
        self.step()
        return FailingFile(super().create(path, size, direct), self)

    def rename(self, old: Path, new: Path) -> None:
        self.step()
        super().rename(old, new)


class FailingFile(File):
    def __init__(self, file: File, storage: Failing) -> None:
        super().__init__(file.path, file._descriptor)
        self._storage = storage

    def write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        self._storage.step()
        super().write(offset, buffers)

    def sync(self) -> None:
        self._storage.step()
        super().sync()


@pytest.mark.parametrize("exchange", [True, False])
def test_an_error_anywhere_leaves_what_was_there(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    if not exchange:
        monkeypatch.setattr(Storage, "exchange", lambda *_: False)
    out = tmp_path / "out"
    run(checkpoint, out, Options(dtype="bf16"))
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    options = Options(max_shard_size=SHARD, overwrite=True)
    calls = Failing(at=0)
    run(checkpoint, tmp_path / "count", options, calls)
    for at in range(1, calls.calls + (0 if exchange else 2)):  # without an exchange, there are two renames
        with pytest.raises(zero.CheckpointError, match=r"out could not be written.*bytes are needed"):
            run(checkpoint, out, options, Failing(at))
        assert {p.name: p.read_bytes() for p in out.iterdir()} == before
        assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint", "count", "latest", "out"]


KILLED = """
import sys, time
from pathlib import Path
from zero.files.storage import File
from zero.consolidate import Options, consolidate, open_source
from zero.files.storage import DISK, Storage
from zero.consolidate.universal import export_universal
from zero.sources.zero_checkpoint import ZeroSource

class SlowFile(File):
    def sync(self):
        super().sync()
        time.sleep(0.1)

class Slow(Storage):
    def create(self, path, size, direct=False):
        file = super().create(path, size, direct)
        return SlowFile(file.path, file._descriptor)

with open_source(Path(sys.argv[1])) as source:
    options = Options(max_shard_size=int(sys.argv[3]), workers=1, overwrite=True)
    consolidate(source, Path(sys.argv[2]), options, storage=Slow())
"""


def test_a_killed_run_leaves_the_old_output_and_is_taken_up_again(
    tmp_path: Path, checkpoint: Path, model: saved.State
) -> None:
    out, staging = tmp_path / "out", tmp_path / ".out.zero-weights"
    run(checkpoint, out, Options(dtype="bf16"))
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(checkpoint), str(out), str(SHARD)])
    _wait_for(lambda: len(list(staging.glob("*.safetensors"))) >= 3, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert saved.same(saved.read(out), saved.cast(model, torch.bfloat16))
    finished = {p.name: p.stat().st_ino for p in staging.glob("*.safetensors")}
    assert 3 <= len(finished) < TENSORS

    written: list[tuple[str, int]] = []
    with open_source(checkpoint) as source:
        options = Options(max_shard_size=SHARD, overwrite=True)
        consolidate(source, out, options, lambda what, done, total: written.append((what, total)))
    assert written[0] == ("writing", (TENSORS - len(finished)) * 256 * 300 * 4)
    assert saved.same(saved.read(out), model)
    assert {name: (out / name).stat().st_ino for name in finished} == finished
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint", "latest", "out"]


def _wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)


ENDED = """
import os, sys
from pathlib import Path
from zero.consolidate import Options, consolidate, open_source
from zero.files.storage import DISK, Storage
from zero.consolidate.universal import export_universal
from zero.sources.zero_checkpoint import ZeroSource

class Ending(Storage):
    def rename(self, old, new):
        super().rename(old, new)
        os._exit(9)

with open_source(Path(sys.argv[1])) as source:
    consolidate(source, Path(sys.argv[2]), Options(max_shard_size=400_000, workers=1), storage=Ending())
"""


def test_what_a_killed_run_has_written_of_damaged_records_is_found(
    tmp_path: Path, model: saved.State
) -> None:
    """A record's checksum is known at its end: when the file that was made of it may be finished already."""
    path, out = tmp_path / "model.pt", tmp_path / "out"
    torch.save(model, path)
    data = bytearray(path.read_bytes())
    data[data.find(model["layers.0.weight"].numpy().tobytes()) + 9] ^= 16
    path.write_bytes(data)
    assert subprocess.run([sys.executable, "-c", ENDED, str(path), str(out)], check=False).returncode == 9
    assert len(list((tmp_path / ".out.zero-weights").glob("*.safetensors"))) == 1
    with pytest.raises(zero.CorruptCheckpointError, match=r"'layers\.0\.weight'"):
        run(path, out)
    assert [p.name for p in tmp_path.iterdir()] == ["model.pt"]


def test_a_killed_run_with_other_names_for_a_tensor_begins_anew(tmp_path: Path, model: saved.State) -> None:
    """Further names of a tensor are in the header alone."""
    path, out = tmp_path / "model.pt", tmp_path / "out"
    torch.save({**model, "tied": model["layers.0.weight"]}, path)
    assert subprocess.run([sys.executable, "-c", ENDED, str(path), str(out)], check=False).returncode == 9
    run(path, out, Options(max_shard_size=SHARD, exclude=("tied",)))
    assert saved.same(saved.read(out), model)


def test_a_killed_run_with_other_options_begins_anew(
    tmp_path: Path, checkpoint: Path, model: saved.State
) -> None:
    staging = tmp_path / ".out.zero-weights"
    staging.mkdir()
    (staging / "plan").write_bytes(b"another")
    (staging / f"model-00001-of-0000{TENSORS}.safetensors").write_bytes(b"something")
    run(checkpoint, tmp_path / "out")
    assert saved.same(saved.read(tmp_path / "out"), model)


def test_two_runs_at_once_are_refused(tmp_path: Path, checkpoint: Path) -> None:
    storage = Storage()
    (tmp_path / ".out.zero-weights").mkdir()
    lock = storage.lock(tmp_path / ".out.zero-weights")
    assert lock is not None
    with pytest.raises(zero.CheckpointError, match="another process is writing"):
        run(checkpoint, tmp_path / "out")
    lock.release()
    run(checkpoint, tmp_path / "out")


def test_what_is_in_the_way_is_left_alone(tmp_path: Path, checkpoint: Path) -> None:
    out = tmp_path / "out"
    out.write_text("a file")
    with pytest.raises(zero.CheckpointError, match="exists and is not a directory"):
        run(checkpoint, out)
    out.unlink()
    out.mkdir()
    run(checkpoint, out)  # an empty directory is as good as none
    with pytest.raises(zero.CheckpointError, match="exists and holds"):
        run(checkpoint, out)
    (out / "runs").mkdir()
    with pytest.raises(zero.CheckpointError, match=r"is not a model directory: it holds 'runs'"):
        run(checkpoint, out, Options(overwrite=True))
    with pytest.raises(zero.CheckpointError, match=r"is not a model directory: it holds 'manifest\.json'"):
        run(checkpoint, checkpoint, Options(overwrite=True))
    with pytest.raises(zero.CheckpointError, match="there is no directory"):
        run(checkpoint, tmp_path / "nowhere" / "out")


@pytest.mark.parametrize("exchange", [True, False])
def test_a_models_other_files_stay(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    out, aside = tmp_path / "out", tmp_path / ".out.new"
    out.mkdir()
    aside.mkdir()  # not ours
    (out / "config.json").write_text("{}")
    (out / "tokenizer.json").symlink_to(tmp_path / "nowhere")
    (out / "pytorch_model.bin").write_text("old weights")
    if not exchange:
        monkeypatch.setattr(Storage, "exchange", lambda *_: False)
    run(checkpoint, out, Options(overwrite=True))
    assert sorted(os.listdir(out)) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (out / "tokenizer.json").readlink() == tmp_path / "nowhere"
    assert sorted(n for n in os.listdir(tmp_path) if n.startswith(".out")) == [".out.new"]


@pytest.mark.parametrize("exchange", [True, False])
def test_what_was_replaced_and_stays_is_no_failure(
    tmp_path: Path,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    exchange: bool,
) -> None:
    def stays(storage: Storage, path: Path) -> None:
        if (path / "pytorch_model.bin").exists():
            raise PermissionError(errno.EACCES, "injected", str(path))
        remove(storage, path)

    out, remove = tmp_path / "out", Storage.remove
    out.mkdir()
    (out / "pytorch_model.bin").write_text("old weights")
    if not exchange:
        monkeypatch.setattr(Storage, "exchange", lambda *_: False)
    with monkeypatch.context() as patch:
        patch.setattr(Storage, "remove", stays)
        run(checkpoint, out, Options(overwrite=True))
    assert os.listdir(out) == ["model.safetensors"]
    assert "out is written, but what it replaces could not be removed" in caplog.text
    run(checkpoint, out, Options(overwrite=True))
    assert not [n for n in os.listdir(tmp_path) if n.startswith(".out")]


class Fixed(Storage):
    """A file system that renames no directories; it also fails at the `at`-th file that moves to another."""

    def __init__(self, at: int = 0) -> None:
        self.at = at
        self.renames = 0

    def rename(self, old: Path, new: Path) -> None:
        if old.is_dir():
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(old))
        self.renames += old.parent != new.parent
        if self.renames == self.at and old.parent != new.parent:
            raise OSError(errno.EIO, "injected", str(old))
        super().rename(old, new)

    def exchange(self, first: Path, second: Path) -> bool:
        return False


@pytest.mark.parametrize("there", ["nothing", "an empty directory", "a model"])
def test_where_directories_cannot_be_renamed(
    tmp_path: Path, checkpoint: Path, model: saved.State, there: str
) -> None:
    """The files move one by one, and an error meanwhile moves them back."""
    out, old = tmp_path / "out", dict[str, bytes]()
    if there != "nothing":
        out.mkdir()
    if there == "a model":
        run(checkpoint, out, Options(dtype="bf16", max_shard_size=SHARD // 2))
        (out / "config.json").write_text("{}")
        (out / "pytorch_model.bin").write_text("old weights")
        old = {path.name: path.read_bytes() for path in out.iterdir()}
    options = Options(max_shard_size=SHARD, overwrite=there == "a model")
    for at in (1, TENSORS // 2, TENSORS + 1):
        with pytest.raises(
            zero.CheckpointError, match=r"out could not be written: .*nothing was left behind"
        ):
            run(checkpoint, out, options, Fixed(at))
        assert out.exists() == (there != "nothing")
        assert {path.name: path.read_bytes() for path in tmp_path.glob("out/*")} == old
    run(checkpoint, out, options, Fixed())
    assert saved.same(saved.read(out), model)
    left = {"config.json"} if there == "a model" else set()
    assert set(os.listdir(out)) == {*saved.weight_map(out).values(), "model.safetensors.index.json", *left}
    assert not [n for n in os.listdir(tmp_path) if n.startswith(".out")]


def test_checkpoints_too_where_directories_cannot_be_renamed(
    tmp_path: Path, checkpoint: Path, model: saved.State, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Storage.rename

    def of_files(storage: Storage, old: Path, new: Path) -> None:
        if old.is_dir():
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(old))
        rename(storage, old, new)

    monkeypatch.setattr(Storage, "rename", of_files)
    with open_source(checkpoint) as source:
        convert(source, tmp_path / "zero")
    with ZeroSource(checkpoint, optimizer=True) as source:
        export_universal(source, tmp_path / "universal")
    for path in (tmp_path / "zero", tmp_path / "universal"):
        run(path, tmp_path / f"{path.name}-weights")
        assert saved.same(saved.read(tmp_path / f"{path.name}-weights"), model)
    assert not [n for n in os.listdir(tmp_path) if n.startswith(".")]


def test_fp16_that_overflows_is_told(tmp_path: Path) -> None:
    synthetic.save(
        tmp_path / "checkpoint", {"fits": torch.tensor([float("inf"), 3.0]), "large": torch.tensor([1e6])}
    )
    with open_source(tmp_path / "checkpoint") as source:
        result = consolidate(source, tmp_path / "out", Options(dtype="fp16"))
    assert result.overflowed == ("large",)


def test_too_little_memory_for_the_workers_is_refused(tmp_path: Path, checkpoint: Path) -> None:
    with pytest.raises(zero.UsageError, match="3 workers with 100 bytes"):
        run(checkpoint, tmp_path / "out", Options(workers=3, memory=100))


MEASURED = """
import sys
from pathlib import Path
from zero.consolidate import Options, consolidate, open_source

def peak():
    (line,) = (l for l in open("/proc/self/status") if l.startswith("VmHWM"))
    return int(line.split()[1]) << 10

sys.modules["torch"] = None  # what imports it fails
before = peak()
with open_source(Path(sys.argv[1])) as source:
    consolidate(source, Path(sys.argv[2]), Options(dtype=sys.argv[3], workers=4, memory=16 << 20))
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_memory_does_not_grow_with_the_model_and_torch_is_not_needed(tmp_path: Path, dtype: str) -> None:
    """300 MB in 16 MiB: what else grows are stacks and code, the same for any model."""
    synthetic.save(tmp_path / "checkpoint", {f"w{n}": torch.randn(2500, 3000) for n in range(10)})
    command = [sys.executable, "-c", MEASURED, str(tmp_path / "checkpoint"), str(tmp_path / "out"), dtype]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert int(done.stdout) < 40 << 20


def test_what_is_written_can_be_read_by_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"half a pair \ud800": torch.ones(2)}, tmp_path / "odd.pt")
    with open_source(tmp_path / "odd.pt") as source:
        for write in (consolidate, convert):
            with pytest.raises(zero.CheckpointError, match="no encoding in UTF-8"):
                write(source, tmp_path / "out")
    torch.save({"w": torch.ones(2)}, tmp_path / "even.pt")
    monkeypatch.setattr("zero.consolidate.plan.METADATA", "x")  # a header that only we can read
    monkeypatch.setattr("zero.files.safetensors_header.METADATA", "x")
    with (
        open_source(tmp_path / "even.pt") as source,
        pytest.raises(zero.CheckpointError, match="library of safetensors"),
    ):
        consolidate(source, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["even.pt", "odd.pt"]


def test_a_name_that_cannot_be_a_path_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "even.pt")
    with open_source(tmp_path / "even.pt") as source:
        for name in ("a" * 300, "a\0b"):
            with pytest.raises(zero.ZeroError):
                consolidate(source, tmp_path / name)
