"""`python -m benchmarks.largest`: the largest model that trains, by way of having state on the host.

Every size is trained each way, in a process of its own; a way ends with the first that fails, or for which
the host has too little memory left: a host that runs out of memory would end more than the benchmark.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import psutil  # type: ignore[import-untyped]
import typer

from benchmarks import peers
from benchmarks.job import Job, JobError
from benchmarks.model import count_parameters
from benchmarks.rows import Rows
from benchmarks.step_rank import StepRank

WARM_UP, STEPS = 3, 2
INTERVAL = 0.2  # seconds between two looks at the host's memory
ENDED = "ended: the host's memory was nearly full"


class Guard:
    """Kills a job's ranks when less than `least` bytes of the host's memory are available."""

    def __init__(self, job: Job, least: int) -> None:
        self._job, self._least, self._over = job, least, threading.Event()
        self.most_used = 0
        self.acted = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        thread = threading.Thread(target=self._watch, daemon=True)
        thread.start()
        try:
            yield
        except JobError as error:
            raise JobError(ENDED) if self.acted else error from None
        finally:
            self._over.set()
            thread.join()

    def _watch(self) -> None:
        while not self._over.wait(INTERVAL):
            memory = psutil.virtual_memory()
            self.most_used = max(self.most_used, memory.total - memory.available)
            if memory.available < self._least:
                self.acted = True
                for pid in self._job.pids:
                    with suppress(psutil.NoSuchProcess):  # it has just ended by itself
                        psutil.Process(pid).kill()
                return


def main(
    device: Annotated[str, typer.Option()] = "sim",
    sizes: Annotated[str, typer.Option(help="Comma-separated, the smallest first.")] = "tiny,small",
    names: Annotated[str, typer.Option("--peers", help="Comma-separated.")] = "zero3-auto,zero3-host-params",
    batch: Annotated[int, typer.Option(min=1, help="Sequences.")] = 1,
    length: Annotated[int, typer.Option(min=1, help="Tokens of each.")] = 16,
    threads: Annotated[int, typer.Option(min=1, help="OMP threads.")] = 1,
    least: Annotated[float, typer.Option(help="GB of the host's memory that must stay available.")] = 1.0,
    limit: Annotated[
        float, typer.Option(help="Seconds that a model may take to build, and to train.")
    ] = 200.0,
    within: Annotated[float, typer.Option(help="Seconds after which no further model begins.")] = 400.0,
    to: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Train each size for a few steps; a row for each, with `error` for the one that did not train."""
    rows = Rows(to, device=device, batch=batch, length=length, threads=threads)
    end = time.monotonic() + within
    for size in sizes.split(","):
        for name in filter(peers.is_installed, names.split(",")):
            if time.monotonic() > end or any(r["peer"] == name and "error" in r for r in rows.rows):
                continue
            about: dict[str, Any] = {"peer": name, "size": size, "parameters": count_parameters(size)}
            setting = peers.Setting("bf16", 1, batch, limit)
            with (
                rows.attempt(**about),
                Job(StepRank, (device, name, size, length, setting), 1, threads, limit) as job,
            ):
                guard = Guard(job, int(least * 1e9))
                with guard.watching():
                    rows.add(**about, **_trained(job, batch * length), host_bytes=guard.most_used)


def _trained(job: Job, tokens: int) -> dict[str, Any]:
    job.call("build")
    job.call("run", WARM_UP, 0)
    (turn,) = job.call("run", 0, STEPS)
    seconds = median(turn.seconds)
    return {"median": seconds, "tokens_per_second": tokens / seconds, "rank_bytes": turn.peak}


if __name__ == "__main__":
    typer.run(main)
