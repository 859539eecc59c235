"""Callbacks for Lightning's Trainer: `Trainer(callbacks=[EMA(), Metrics()], strategy="zero")`.

An average of sharded weights, and the engine's metrics for Lightning's loggers.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from zero import average
from zero.engine import Engine
from zero.files.manifest import AVERAGE
from zero.files.reader import Checkpoint, find
from zero.loading.together import all_or_none
from zero.observe.observation import Observing
from zero.observe.writers.calls import Calls

KEY = "average"  # in a checkpoint's state


class EMA(Callback):
    """An exponential moving average of the weights: `zero.EMA` in a callback.

    It takes the place of Lightning's EMAWeightAveraging, which has whole models on every rank, and does as
    that does: the first update takes the weights as they are, validation uses the average, and when a fit
    ends the module has it. Files with weights only have the average; a checkpoint has both. Buffers are not
    averaged.

    decay: of the average at an update, in a resumed fit too, whatever its checkpoint had. every: optimizer
        steps from one update to the next; the first is at the first step.
    """

    def __init__(self, decay: float = 0.999, every: int = 1) -> None:
        self.decay = decay
        self.every = every
        self.average: average.EMA | None = None
        self._step = 0

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        self._step = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self._step or (trainer.global_step - 1) % self.every:
            return
        self._step = trainer.global_step
        if self.average is None:
            self.average = average.EMA(engine_of(trainer), self.decay)
        else:
            self.average.decay = self.decay
            self.average.update()

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        if self.average is not None:
            self.average.adopt()
        self.average = None

    def swap(self, *_: Any) -> None:
        """Exchange the weights and the average. Collective."""
        if self.average is not None:
            self.average.swap()

    on_validation_epoch_start = on_validation_epoch_end = swap

    def saved_in(self, path: Path, engine: Engine) -> dict[str, average.EMA]:
        """What to restore from a checkpoint: its average, if it has one, which this goes on with. Collective:
        raises on every rank if one cannot read it."""
        if not all(all_or_none(engine._communicator, "the checkpoint", lambda: _has_average(path))):
            return {}
        self.average = average.EMA(engine, self.decay)
        return {KEY: self.average}


class Metrics(Callback):
    """Tells the Trainer's loggers what observers of the engine are told, such as zero/seconds/forward.

    every: optimizer steps from one that is told to the next; by default the Trainer's log_every_n_steps.
    """

    def __init__(self, every: int | None = None) -> None:
        self.every = every
        self._observing: Observing | None = None

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        def log(values: dict[str, float], step: int) -> None:
            for logger in trainer.loggers:
                logger.log_metrics(values, step)

        observer = Calls(log, self.every or trainer.log_every_n_steps)
        self._observing = engine_of(trainer).observe(observer)

    def on_train_end(self, *_: Any) -> None:
        if self._observing is not None:
            self._observing.close()
            self._observing = None

    on_exception = on_train_end


def _has_average(path: Path) -> bool:
    with closing(Checkpoint(find(path))) as found:
        return any(key.startswith(AVERAGE) for key in found.manifest.tensors)


def engine_of(trainer: Trainer) -> Engine:
    engine: Engine = trainer.strategy.engine
    return engine
