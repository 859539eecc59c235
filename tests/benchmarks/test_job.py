"""Ranks that fail, die or hang end the benchmark with a reason."""

from __future__ import annotations

import os
import time

import pytest
from benchmarks.job import Job, JobError

pytestmark = pytest.mark.slow  # starts programs


class Trouble:
    """A rank that does as it is told."""

    def fail(self) -> None:
        raise ValueError("no good")

    def die(self) -> None:
        if os.environ["RANK"] == "1":
            os._exit(1)
        time.sleep(60)

    def hang(self) -> None:
        time.sleep(60)


@pytest.mark.parametrize(
    ("method", "limit", "message"),
    [
        ("fail", 60.0, "ValueError: no good"),
        ("die", 60.0, "rank 1 died in die"),
        ("hang", 1.0, r"ranks \[0\] took over 1 s in hang"),
    ],
)
def test_trouble_is_reported(method: str, limit: float, message: str) -> None:
    ranks = 1 if method == "hang" else 2
    with Job(Trouble, (), ranks, threads=1, limit=limit) as job, pytest.raises(JobError, match=message):
        job.call(method)
