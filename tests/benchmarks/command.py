"""The command `python -m benchmarks`."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks import job
from tests.accelz.fake_distribution import environment
from tests.accelz.forked import Popen

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 150


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


class Benchmark(Popen):
    """One whose ranks are forked, too, where it would spawn them."""

    @staticmethod
    def before() -> None:
        context = SimpleNamespace(Pipe=multiprocessing.Pipe, Process=_rank)
        namespace = SimpleNamespace(get_context=lambda _: context, process=multiprocessing.process)
        job.multiprocessing = namespace  # type: ignore[attr-defined]


def forked_bench(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The same without the seconds that imports take, of each rank again. What it prints goes to `folder`."""
    out, errors = folder / "stdout", folder / "stderr"
    with out.open("w") as printed, errors.open("w") as told:
        command = [sys.executable, "-m", "benchmarks", *arguments]
        running = Benchmark(command, env=environment(folder), cwd=ROOT, stdout=printed, stderr=told)
    try:
        code = running.wait(SECONDS)
    except subprocess.TimeoutExpired:
        running.kill()
        running.wait()
        raise
    return subprocess.CompletedProcess(command, code, out.read_text(), errors.read_text())


def _rank(target: Callable[..., None], args: tuple[Any, ...], daemon: bool) -> Any:
    context = multiprocessing.get_context("forkserver")
    return context.Process(target=_serve, args=(dict(os.environ), target, args), daemon=daemon)


def _serve(variables: dict[str, str], target: Callable[..., None], args: tuple[Any, ...]) -> None:
    os.environ.clear()
    os.environ.update(variables)
    torch.set_num_threads(int(variables["OMP_NUM_THREADS"]))
    target(*args)
