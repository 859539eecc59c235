"""Saving checkpoints: in the foreground, beside a raw write of as many bytes; and in the background."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.job import Job
from benchmarks.model import count_parameters
from benchmarks.result import Result, ratio, spread
from benchmarks.saving_rank import SavingRank

WARM = 2  # untimed steps


@dataclass(frozen=True)
class SavingOptions:
    """Options of the benchmark.

    every: steps from one background save to the next. steps: of a turn of training. folder: on the disk to
    measure. limit: seconds that one call may take.
    """

    size: str = "medium"
    precision: Literal["bf16", "fp32"] = "bf16"
    ranks: int = 2
    threads: int = 1
    batch: int = 2
    length: int = 128
    rounds: int = 5
    steps: int = 20
    every: int = 10
    folder: str | None = None
    limit: float = 120.0


def run(options: SavingOptions) -> Result:
    """Time rounds of: a raw write, a save, and steps without and with saves in the background."""
    arguments = (options.size, options.length, options.batch, options.precision, options.limit)
    turns: dict[str, list[float]] = {"raw write": [], "save": [], "steps": [], "steps and saves": []}
    with (
        tempfile.TemporaryDirectory(dir=options.folder) as folder,
        Job(SavingRank, arguments, options.ranks, options.threads, options.limit) as job,
    ):
        job.call("train", WARM, 1, folder)
        nbytes = [size for _, size in job.call("save", f"{folder}/first")]
        for _ in range(options.rounds):
            turns["raw write"].append(max(job.call("write", folder, max(nbytes))))
            turns["save"].append(max(seconds for seconds, _ in job.call("save", f"{folder}/now")))
            shutil.rmtree(Path(folder) / "now")
            turns["steps"].append(max(job.call("train", options.steps, 0, folder)))
            turns["steps and saves"].append(max(job.call("train", options.steps, options.every, folder)))
    settings = {**asdict(options), "folder": None, "parameters": count_parameters(options.size)}
    return Result("saving", settings, _rows(turns, sum(nbytes)))


def _rows(turns: dict[str, list[float]], nbytes: int) -> list[dict[str, Any]]:
    raw, save = turns["raw write"], turns["save"]
    plain, saving = turns["steps"], turns["steps and saves"]
    written: list[dict[str, Any]] = [
        {"case": "raw write", **spread(raw), "bytes": nbytes, "of_raw": None},
        {"case": "save_checkpoint", **spread(save), "bytes": nbytes, "of_raw": ratio(raw, save)},
    ]
    trained: list[dict[str, Any]] = [
        {"case": "training", **spread(plain), "cost": None},
        {"case": "training, saving in the background", **spread(saving), "cost": ratio(saving, plain) - 1},
    ]
    for row in written:
        row |= {"bytes_per_second": nbytes / row["median"], "cost": None}
    return written + [{**row, "bytes": None, "of_raw": None, "bytes_per_second": None} for row in trained]
