"""`python -m benchmarks.consolidate`: whole weights from a sharded checkpoint, beside a copy of their bytes.

The checkpoint is laid out as DeepSpeed's stage 3 saves it. Where DeepSpeed and huggingface_hub are
installed, DeepSpeed's zero_to_fp32 takes part. Every turn is a process of its own; the peak of its
resident memory is the system's number.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from tests.zero.consolidate.deepspeed_layout import Layout, Model, save

from benchmarks.job import JobError

CONSOLIDATE = "from zero.cli import app; app()"
PROBE = """
import mmap, os, sys, threading
source, target, threads, chunk = sys.argv[1], sys.argv[2], int(sys.argv[3]), 1 << 22
size = os.path.getsize(source) // chunk * chunk
read = os.open(source, os.O_RDONLY)
write = os.open(target, os.O_WRONLY | os.O_CREAT | getattr(os, "O_DIRECT", 0))
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
    """parameters: elements of the model. ranks: of the job that saved. workers: threads, of the copy too."""

    parameters: int = 250_000_000
    ranks: int = 8
    workers: int = 2
    rounds: int = 3
    limit: float = 600.0


@dataclass(frozen=True)
class Turn:
    """One process: its time, the bytes it wrote, its peak of resident bytes."""

    seconds: float
    written: int
    peak: int

    @property
    def rate(self) -> float:
        return self.written / self.seconds


def run(options: ConsolidateOptions, folder: Path) -> list[dict[str, Any]]:
    """A row for each way: median seconds, bytes written, peak resident bytes.

    folder: on the disk to measure.
    """
    with _checkpoint(options, folder) as checkpoint:
        commands = _commands(options, checkpoint, folder / "out")
        turns: dict[str, list[Turn]] = {name: [] for name in commands}
        for _ in range(options.rounds):
            for name, command in commands.items():
                turns[name].append(_turn(command, folder / "out", options.limit))
    return [_row(name, turns[name], turns["copy"]) for name in commands]


@contextmanager
def _checkpoint(options: ConsolidateOptions, folder: Path) -> Iterator[Path]:
    """Eight matrices, and a file of the bytes that consolidating them writes, for the copy."""
    width = 4096
    rows = options.parameters // width // 8
    generator = torch.Generator().manual_seed(1)
    weights = {f"layers.{n}.weight": torch.randn(rows, width, generator=generator) for n in range(8)}
    checkpoint = folder / "checkpoint"
    save(checkpoint, Model([weights]), Layout(stage=3, ranks=options.ranks))
    with (folder / "bytes").open("wb") as file:
        for value in weights.values():
            file.write(memoryview(value.view(-1).numpy()).cast("B"))
    del weights
    os.sync()
    yield checkpoint


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
        commands["zero_to_fp32"] = [sys.executable, *script]
    return commands


def _turn(command: list[str], out: Path, limit: float) -> Turn:
    """Run a command; raises JobError where it fails or takes over `limit` seconds."""
    begun = time.perf_counter()
    with tempfile.TemporaryFile() as log:
        streams = [(os.POSIX_SPAWN_DUP2, log.fileno(), number) for number in (1, 2)]
        pid = os.posix_spawnp(command[0], command, os.environ, file_actions=streams)
        status, usage = _wait(pid, begun + limit)
        seconds = time.perf_counter() - begun
        if status:
            log.seek(0)
            said = log.read().decode(errors="replace")[-2000:]
            raise JobError(f"{' '.join(command[:4])} … failed:\n{said}")
    files = list(out.iterdir()) if out.is_dir() else [out]
    written = sum(file.stat().st_size for file in files)
    if out.is_dir():
        shutil.rmtree(out)
    else:
        out.unlink()
    return Turn(seconds, written, usage.ru_maxrss << 10)


def _wait(pid: int, deadline: float) -> tuple[int, Any]:
    while time.perf_counter() < deadline:
        done, status, usage = os.wait4(pid, os.WNOHANG)
        if done:
            return status, usage
        time.sleep(0.01)
    os.kill(pid, 9)
    os.wait4(pid, 0)
    raise JobError(f"process {pid} did not end in time")


def _row(name: str, turns: list[Turn], copies: list[Turn]) -> dict[str, Any]:
    return {
        "by": name,
        "seconds": median(turn.seconds for turn in turns),
        "bytes": turns[0].written,
        "bytes_per_second": median(turn.rate for turn in turns),
        "of_copy": median(turn.rate / copy.rate for turn, copy in zip(turns, copies, strict=True)),
        "peak_bytes": max(turn.peak for turn in turns),
        "rounds": [turn.seconds for turn in turns],
    }


def main(
    parameters: Annotated[int, typer.Option(min=1 << 20)] = ConsolidateOptions.parameters,
    ranks: Annotated[int, typer.Option(min=1)] = ConsolidateOptions.ranks,
    workers: Annotated[int, typer.Option(min=1)] = ConsolidateOptions.workers,
    rounds: Annotated[int, typer.Option(min=1)] = ConsolidateOptions.rounds,
    folder: Annotated[
        Path | None, typer.Option(help="On the disk to measure; needs 20 B a parameter.")
    ] = None,
) -> None:
    """Seconds include starting Python and importing torch; the copy has no torch to import."""
    options = ConsolidateOptions(parameters, ranks, workers, rounds)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        rows = run(options, Path(place))
    table = Table("by", "s", "MB", "MB/s", "of copy", "peak MB", title=str(asdict(options)))
    for row in rows:
        numbers = (row["bytes"] / 1e6, row["bytes_per_second"] / 1e6)
        cells = (f"{row['seconds']:.2f}", *(f"{n:.0f}" for n in numbers), f"{row['of_copy']:.2f}")
        table.add_row(row["by"], *cells, f"{row['peak_bytes'] / 1e6:.0f}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
