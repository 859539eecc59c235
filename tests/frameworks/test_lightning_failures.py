"""Ranks that do not go the same way through the Trainer's loop: nobody waits for long, and who is missing is
named."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import OnExceptionCheckpoint

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.frameworks.lightning_modules import Module, loader, trainer_of
from tests.zero.helpers.failing import TIMEOUT, Ended, Job, ended_jobs
from zero.integrations.lightning import ZeroStrategy

CASES = ("data", "exception", "stop", "death")
"""What rank 1 has alone."""


class OneStops(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 2:
            trainer.should_stop = True


def fit_body(context: Context, case: str) -> int:
    module = Module(fails_on=(1, 2) if case in ("exception", "death") else None)
    if case == "death":
        module.fail = lambda: os._exit(1)
    strategy = ZeroStrategy(zero.Config(timeout=TIMEOUT))
    callbacks = [OneStops()] if case == "stop" else []
    trainer = trainer_of(strategy, callbacks=callbacks, use_distributed_sampler=case != "data")
    trainer.fit(module, loader(16 if case == "data" and context.rank == 1 else 24))
    return len(module.seen)


@pytest.fixture(scope="module")
def left(cluster: Clusters) -> Ended:
    """How the jobs end, which mostly wait."""
    jobs = {case: Job(2, fit_body, {"case": case}, TIMEOUT) for case in CASES}
    return ended_jobs(cluster, jobs, together=True)


@pytest.mark.parametrize("case", CASES)
def test_a_rank_that_leaves_is_named(left: Ended, case: str) -> None:
    stayed, _ = left[case]
    assert stayed.status == "raised"
    assert "Error: " in stayed.error
    assert "rank 1" in stayed.error


class Terminated(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 3:
            os.kill(os.getpid(), signal.SIGTERM)


def terminated_body(context: Context, folder: str) -> None:
    """All ranks save and stop when they are told to, and others go on from there."""
    first, callbacks = Module(), [Terminated(), OnExceptionCheckpoint(folder, "left")]
    with pytest.raises(SystemExit):
        trainer_of("zero", callbacks=callbacks, enable_checkpointing=True).fit(first, loader())
    assert len(first.seen) == 3
    second, trainer = Module(), trainer_of("zero")
    trainer.fit(second, loader(), ckpt_path=f"{folder}/left.ckpt")
    assert len(second.seen) == 7  # of ten steps in two epochs
    assert trainer.strategy.engine.steps == 10


def test_a_job_that_is_told_to_end_saves(cluster: Clusters, tmp_path: Path) -> None:
    cluster(2).run(terminated_body, folder=str(tmp_path))
