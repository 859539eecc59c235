"""An average of sharded weights, for Lightning's Trainer: `Trainer(callbacks=[EMA()], strategy="zero")`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from zero.engine import Engine
from zero.errors import StateError


class EMA(Callback):
    """An exponential moving average of the weights, of which every rank keeps its slices, in fp32.

    It takes the place of Lightning's EMAWeightAveraging, which has whole models on every rank, and does as
    that does: the first update takes the weights as they are, validation uses the average, and when a fit
    ends the module has it. Files with weights only have the average; a checkpoint has both, and is resumed
    with as many ranks as have saved it. Buffers are not averaged.

    decay: of the average at an update. every: optimizer steps from one update to the next; the first is at
        the first step.
    """

    def __init__(self, decay: float = 0.999, every: int = 1) -> None:
        self.decay = decay
        self.every = every
        self.average: list[Tensor] = []
        self._step = 0

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self._step or (trainer.global_step - 1) % self.every:
            return
        self._step = trainer.global_step
        values = slices(engine_of(trainer))
        if not self.average:
            self.average = [value.detach().clone() for value in values]
            return
        for average, value in zip(self.average, values, strict=True):
            average.lerp_(value.detach(), 1 - self.decay)

    def on_validation_epoch_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.swap(engine_of(trainer))

    def on_validation_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.swap(engine_of(trainer))

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.swap(engine_of(trainer))
        self.average = []

    def swap(self, engine: Engine) -> None:
        """Exchange the weights and the average. Collective."""
        if not self.average:
            return
        with torch.no_grad():
            for average, value in zip(self.average, slices(engine), strict=True):
                before = value.clone()
                value.copy_(average)
                average.copy_(before)
        engine.refresh_weights()

    @contextmanager
    def applied(self, engine: Engine) -> Iterator[None]:
        """In the block, the model has the average. Collective."""
        self.swap(engine)
        yield
        self.swap(engine)

    def restore(self, saved: Sequence[dict[str, Any]], engine: Engine) -> None:
        """Go on with an average that a checkpoint has. saved: the state of every rank that saved it."""
        if not any(saved):
            return
        if len(saved) != engine.world_size:
            raise StateError(
                f"the checkpoint's average was saved by {len(saved)} ranks, and this job has "
                f"{engine.world_size}: resume with as many, or without the EMA callback"
            )
        kept = zip(saved[engine.rank]["average"], slices(engine), strict=True)
        self.average = [average.to(value.device) for average, value in kept]


def slices(engine: Engine) -> list[Tensor]:
    """The values that this rank's optimizer steps."""
    return [value for group in engine.optimizer.param_groups for value in group["params"]]


def engine_of(trainer: Trainer) -> Engine:
    engine: Engine = trainer.strategy.engine
    return engine
