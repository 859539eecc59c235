"""What else there is where checkpoints go: other programs' files, and file systems with fewer services."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zero
from tests.accelz.fake_distribution import importable
from tests.zero.helpers import small_saves
from zero.checkpoint.save_messages import SaveMessages
from zero.files.publication import Publication
from zero.files.reader import find
from zero.files.storage import DISK, PAGE


def save_small(path: Path, keep_last: int | None = None) -> None:
    errors = small_saves.save(DISK, path, 1, keep_last)
    if errors[0] is not None:
        raise errors[0]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A directory with a checkpoint `a`."""
    save_small(tmp_path / "a")
    return tmp_path


def publication(path: Path) -> Publication:
    return Publication(DISK, path, None)


def test_hidden_files_of_others_stay(runs: Path) -> None:
    for name in (".data.new", ".mail.trash", ".venv.old"):
        (runs / name).mkdir()
        (runs / name / "file").write_text("kept")
    for name in (".rc.old", ".rc.new"):
        (runs / name).write_text("kept")
    before = set(os.listdir(runs))
    save_small(runs / "b")
    assert set(os.listdir(runs)) == before | {"b"}
    assert (runs / ".venv.old" / "file").read_text() == "kept"


def test_a_link_is_not_replaced(runs: Path) -> None:
    (runs / "best").symlink_to("a")
    with pytest.raises(zero.CheckpointError, match="best is a symbolic link"):
        save_small(runs / "best")
    assert find(runs / "best") == runs / "best"
    assert find(runs / "a") == runs / "a"


def test_a_link_that_rotates_out_goes_alone(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_small(tmp_path / name, keep_last=2)
    (tmp_path / "a").rename(tmp_path / "kept")
    (tmp_path / "a").symlink_to("kept")
    save_small(tmp_path / "c", keep_last=2)
    assert sorted(os.listdir(tmp_path)) == ["b", "c", "kept", "latest"]
    assert find(tmp_path / "kept") == tmp_path / "kept"


@pytest.mark.parametrize("kind", ["link", "directory", "name"])
def test_latest_of_another_program(tmp_path: Path, kind: str) -> None:
    """Seen before anything is written, by a load too."""
    (tmp_path / "global_step3").mkdir()
    latest = tmp_path / "latest"
    if kind == "name":
        latest.write_text("global_step3\n")
    elif kind == "directory":
        latest.mkdir()
    else:
        latest.symlink_to("global_step3")
    with pytest.raises(zero.CheckpointError, match=r"latest belongs to another program"):
        save_small(tmp_path / "a")
    assert sorted(os.listdir(tmp_path)) == ["global_step3", "latest"]
    if kind == "name":
        with pytest.raises(zero.CheckpointError, match=r"another program.*`zero convert`"):
            find(tmp_path)


def test_a_latest_that_somebody_has_edited(tmp_path: Path) -> None:
    """It is told what there is, and the next save puts it right."""
    for name in ("a", "b"):
        save_small(tmp_path / name)
    (tmp_path / "latest").write_text("a\n")
    with pytest.raises(zero.CorruptCheckpointError, match=r"by its own name; available: a, b"):
        find(tmp_path)
    assert find(tmp_path / "a") == tmp_path / "a"
    save_small(tmp_path / "c")
    assert find(tmp_path) == tmp_path / "c"


@pytest.mark.parametrize(
    ("file", "hint"),
    [
        ("model.safetensors", r"load_pretrained"),
        ("mp_rank_00_model_states.pt", "zero convert"),
        (".metadata", "zero convert"),
    ],
)
def test_weights_of_others_are_told(tmp_path: Path, file: str, hint: str) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / file).write_text("")
    with pytest.raises(zero.CheckpointError, match=hint):
        find(tmp_path / "a")


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
def test_no_space_can_be_reserved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("zero.files.storage._fallocate", refuse)
    file = DISK.create(tmp_path / "a", 5 * PAGE, direct=True)
    assert file.size() == 5 * PAGE
    file.close()
    monkeypatch.setattr("zero.files.storage._fallocate", _full)
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/b'$"):
        DISK.create(tmp_path / "b", 5 * PAGE)


@pytest.mark.parametrize("call", ["pwritev", "fsync", "ftruncate", "preadv", "fstat"])
def test_what_fails_on_an_open_file_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The system knows only the descriptor."""
    file = DISK.create(tmp_path / "a", 0)
    calls: dict[str, Callable[[], Any]] = {
        "pwritev": lambda: file.write(0, [memoryview(b"some")]),
        "fsync": file.sync,
        "ftruncate": lambda: file.truncate(1),
        "preadv": lambda: file.read(0, memoryview(bytearray(1))),
        "fstat": file.size,
    }
    with monkeypatch.context() as patch:
        patch.setattr(os, call, _full)
        with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/a'$"):
            calls[call]()
    file.close()


def _full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_file_system_that_locks_no_directories(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS: a lock for writing wants a file that is open for writing."""
    flock = fcntl.flock

    def of_files(descriptor: int, operation: int) -> None:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", of_files)
    living = publication(runs / "b")
    living.begin()
    with pytest.raises(zero.CheckpointError, match="another save of"):
        publication(runs / "b").begin()
    save_small(runs / "c")
    assert living.staging.is_dir()
    living.close()  # as if killed
    save_small(runs / "d")
    assert not living.staging.exists()
    assert find(runs) == runs / "d"


def test_more_files_than_the_soft_limit(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    path = tmp_path / "a"
    path.write_text("")
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 8, hard))
    try:
        files = [DISK.open(path) for _ in range(64)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for file in files:
        file.close()


ON_AN_OVERLAY = """
from pathlib import Path
from accelz import selection
from tests.zero.helpers import small_saves
from zero.files.reader import find
from zero.files.storage import DISK
selection.use("cpu")
runs = Path("there")
for name, steps, keep_last in (("b", 5, 2), ("c", 6, 2), ("c", 7, 1)):
    assert small_saves.save(DISK, runs / name, steps, keep_last) == [None, None]
    assert small_saves.contents(find(runs), DISK) == (steps, small_saves.expected(steps))
"""
MOUNTED = """
mount -t overlay overlay -o lowerdir=lower,upperdir=upper,workdir=work there || exit 77
"$0" -c "$1" && ls -A there
"""


@pytest.mark.slow
def test_checkpoints_of_an_overlays_lower_layer_are_replaced_and_rotate_out(tmp_path: Path) -> None:
    for name in ("lower", "upper", "work", "there"):
        (tmp_path / name).mkdir()
    save_small(tmp_path / "lower" / "a", 2)
    save_small(tmp_path / "lower" / "b", 2)
    command = ["unshare", "--mount", "sh", "-c", MOUNTED, sys.executable, ON_AN_OVERLAY]
    environment = {**os.environ, "PYTHONPATH": importable()}
    try:
        done = subprocess.run(
            command, check=False, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
        )
    except FileNotFoundError:
        pytest.skip("there is no unshare")
    if done.returncode == 77 or "unshare failed" in done.stderr:
        pytest.skip("no overlay may be mounted")
    assert done.stdout.split() == ["c", "latest"], done.stderr
    assert "could not be done" not in done.stderr


def test_a_published_checkpoint_is_no_failure_where_other_ranks_cannot_be_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    publish = SaveMessages.publish

    def without_outcome(messages: SaveMessages, topic: str, value: Any) -> None:
        if topic == "outcome":
            raise zero.CommunicationError("the job's store does not respond")
        publish(messages, topic, value)

    monkeypatch.setattr(SaveMessages, "publish", without_outcome)
    path = tmp_path / "a"
    first, second = small_saves.save(DISK, path, 1, timeout=0.5)
    assert first is None
    assert f"{path} is saved, but the job's store does not respond" in caplog.text
    assert isinstance(second, zero.CommunicationError)
    assert f"does not know whether the checkpoint {path} was published: if it is there" in str(second)
    assert find(tmp_path) == path
