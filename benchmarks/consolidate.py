"""Consolidating a sharded checkpoint, beside a copy of the same bytes and DeepSpeed's own tool.

The checkpoint is laid out as DeepSpeed's stage 3 saves it. If DeepSpeed and huggingface_hub are installed,
DeepSpeed's zero_to_fp32 takes part. Every turn is a process of its own, whose peak of resident memory the
operating system reports.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from tests.zero.helpers.deepspeed_layout import Layout, Model, save
from torch import Tensor

from benchmarks.job import JobError
from benchmarks.result import Result, ratio, spread

PEER = "zero_to_fp32"
EXACT = ("zero fp32", PEER)
CONSOLIDATE = "from zero.cli import app; app()"
MEASURE = """
import resource, subprocess, sys, time
begun = time.perf_counter()
status = subprocess.run(sys.argv[1:], stdout=sys.stderr).returncode
print(time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(status)
"""  # a small process in between, as a child of a large one would count the parent's memory as its own
PROBE = """
import mmap, os, sys, threading
source, target, threads, chunk = sys.argv[1], sys.argv[2], int(sys.argv[3]), 1 << 22
size = os.path.getsize(source) // chunk * chunk
direct = getattr(os, "O_DIRECT", 0)
read = os.open(source, os.O_RDONLY | direct)
write = os.open(target, os.O_WRONLY | os.O_CREAT | direct)
os.posix_fallocate(write, 0, size)
offsets, lock = iter(range(0, size, chunk)), threading.Lock()
def copy():
    buffer = mmap.mmap(-1, chunk)
    while True:
        with lock:
            offset = next(offsets, None)
        if offset is None:
            return
        os.preadv(read, [buffer], offset)
        os.pwritev(write, [buffer], offset)
workers = [threading.Thread(target=copy) for _ in range(threads)]
for worker in workers: worker.start()
for worker in workers: worker.join()
os.fsync(write)
"""


@dataclass(frozen=True)
class ConsolidateOptions:
    """Options of the benchmark.

    parameters: elements of the model. ranks: of the job that saved. workers: threads, also of the copy.
    folder: on the disk to measure, which needs 20 bytes per parameter. limit: seconds for one process.
    """

    parameters: int = 250_000_000
    ranks: int = 8
    workers: int = 4
    rounds: int = 3
    folder: str | None = None
    limit: float = 600.0


@dataclass(frozen=True)
class Turn:
    """One process.

    read, written: bytes of weights. peak: resident bytes. equal: whether its tensors are right; None if they
    were not compared.
    """

    seconds: float
    read: int
    written: int
    peak: int
    equal: bool | None

    @property
    def rate(self) -> float:
        """Bytes per second, read and written."""
        return (self.read + self.written) / self.seconds


def run(options: ConsolidateOptions) -> Result:
    """Time rounds of: the copy, zero to fp32, zero to bf16, and zero_to_fp32 if it is installed."""
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        folder = Path(place)
        _make(options, folder)
        commands = _commands(options, folder / "checkpoint", folder / "out")
        turns: dict[str, list[Turn]] = {name: [] for name in commands}
        for number in range(options.rounds):
            for name, command in commands.items():
                compare = number == 0 and name in EXACT
                turns[name].append(_turn(command, folder, options.limit, compare))
    notes = [] if PEER in commands else [f"{PEER} needs deepspeed and huggingface_hub"]
    rows = [_row(name, turns) for name in commands]
    return Result("consolidate", {**asdict(options), "folder": None}, rows, notes)


def _make(options: ConsolidateOptions, folder: Path) -> None:
    """Write eight matrices as a checkpoint, and their bytes as a file, for the copy and to compare with."""
    width = 4096
    rows = options.parameters // width // 8
    generator = torch.Generator().manual_seed(1)
    weights = {f"layers.{n}.weight": torch.randn(rows, width, generator=generator) for n in range(8)}
    with (folder / "bytes").open("wb") as file:
        for value in weights.values():
            file.write(memoryview(value.view(-1).numpy()).cast("B"))
    save(folder / "checkpoint", Model([weights]), Layout(stage=3, ranks=options.ranks))


def _commands(options: ConsolidateOptions, checkpoint: Path, out: Path) -> dict[str, list[str]]:
    ours = [sys.executable, "-c", CONSOLIDATE, "consolidate", str(checkpoint), str(out)]
    ours += ["--workers", str(options.workers)]
    commands = {
        "copy": [sys.executable, "-c", PROBE, str(out.with_name("bytes")), str(out), str(options.workers)],
        "zero fp32": ours,
        "zero bf16": [*ours, "--dtype", "bf16"],
    }
    if all(importlib.util.find_spec(name) for name in ("deepspeed", "huggingface_hub")):
        script = ["-m", "deepspeed.utils.zero_to_fp32", str(checkpoint), str(out), "--safe_serialization"]
        commands[PEER] = [sys.executable, *script]
    return commands


def _turn(command: list[str], folder: Path, limit: float, compare: bool) -> Turn:
    """Run a command that writes `folder`/out, and remove that.

    compare: check that its tensors have the bytes that they should have. Raises JobError if the command fails
    or takes over `limit` seconds.
    """
    _forget(folder)
    seconds, peak = _launch(command, limit)
    out = folder / "out"
    files = list(out.iterdir()) if out.is_dir() else [out]
    written = sum(file.stat().st_size for file in files)
    equal = _is_equal(folder) if compare else None
    shutil.rmtree(out) if out.is_dir() else out.unlink()
    return Turn(seconds, (folder / "bytes").stat().st_size, written, peak, equal)


def _launch(command: list[str], limit: float) -> tuple[float, int]:
    """Run a command; returns its seconds and its peak of resident bytes."""
    helper = [sys.executable, "-S", "-c", MEASURE, *command]
    with tempfile.TemporaryFile() as log:
        pipes = {"stdout": subprocess.PIPE, "stderr": log}
        with subprocess.Popen(helper, start_new_session=True, text=True, **pipes) as process:  # type: ignore[call-overload]
            try:
                said, _ = process.communicate(timeout=limit)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                raise JobError(f"{' '.join(command[:4])} … took over {limit:g} s") from None
        if process.returncode:
            log.seek(0)
            errors = log.read().decode(errors="replace")[-2000:]
            raise JobError(f"{' '.join(command[:4])} … failed:\n{errors}")
    seconds, kibibytes = said.split()
    return float(seconds), int(kibibytes) << 10


def _forget(folder: Path) -> None:
    """Drop the folder's files from the page cache, so that reads come from the disk."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def _is_equal(folder: Path) -> bool:
    """Whether the fp32 tensors in `folder`/out, in order of their names, are the bytes in `folder`/bytes."""
    found: dict[str, Tensor] = {}
    for path in (folder / "out").glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    wanted, at = np.memmap(folder / "bytes", np.int32, "r"), 0
    for _, value in sorted(found.items()):
        mine = value.view(-1).numpy().view(np.int32)
        if not np.array_equal(mine, wanted[at : at + mine.size]):
            return False
        at += mine.size
    return at == wanted.size


def _row(name: str, all_turns: Mapping[str, Sequence[Turn]]) -> dict[str, Any]:
    turns = all_turns[name]
    seconds = [turn.seconds for turn in turns]
    return {
        "by": name,
        **spread(seconds),
        "bytes": turns[0].written,
        "bytes_per_second": median(turn.written / turn.seconds for turn in turns),
        "of_copy": ratio([t.rate for t in turns], [t.rate for t in all_turns["copy"]]),
        "to_deepspeed": ratio(seconds, [t.seconds for t in all_turns[PEER]]) if PEER in all_turns else None,
        "peak_bytes": max(turn.peak for turn in turns),
        "equal": turns[0].equal,
    }
