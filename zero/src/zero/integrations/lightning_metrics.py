"""The engine's metrics for Lightning's loggers: `Trainer(callbacks=[Metrics()], strategy="zero")`."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer

from zero.integrations.lightning_ema import engine_of
from zero.observe.observation import Observing
from zero.observe.writers.calls import Calls


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

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        self._close()

    def on_exception(self, trainer: Trainer, module: LightningModule, exception: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        if self._observing is not None:
            self._observing.close()
            self._observing = None
