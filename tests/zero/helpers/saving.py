"""Engines that save, and a storage that fails or waits."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zero
from accelz.conformance.cluster import Context
from tests.zero.helpers.fingerprint import Fingerprint, fingerprint
from tests.zero.helpers.loops import train_on
from tests.zero.helpers.models import fresh, language_loss
from tests.zero.helpers.resumed_job import Job
from tests.zero.helpers.training import adamw
from zero.files.storage import File, Storage


def engine_of(context: Context, **settings: Any) -> zero.Engine:
    model = fresh()
    return zero.initialize(model, adamw(model), zero.Config(timeout=10, **settings))


def train(engine: zero.Engine, context: Context, steps: int = 1) -> None:
    for _ in range(steps):
        train_on(engine, language_loss(engine.module, engine.steps, context.rank))


class BrokenStorage(Storage):
    """Fails to write on one rank, or waits for a sign."""

    def __init__(self, error: OSError | None = None, gate: threading.Event | None = None) -> None:
        self.error = error
        self.gate = gate

    def create(self, path: Path, size: int, direct: bool = False) -> File:
        file = super().create(path, size, direct)
        write = file.write

        def broken(offset: int, buffers: Sequence[memoryview]) -> None:
            if self.gate is not None:
                assert self.gate.wait(20)
            if self.error is not None:
                raise self.error
            write(offset, buffers)

        file.write = broken  # type: ignore[method-assign]
        return file


def save_body(context: Context, path: str, optimizer: str = "adamw", **settings: Any) -> Fingerprint:
    job = Job(context, optimizer, fresh=True, **settings)
    job.train(3)
    job.save(path)
    return fingerprint(job.engine)
