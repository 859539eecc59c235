"""The sharded average beside Lightning's EMAWeightAveraging."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import EMAWeightAveraging

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.frameworks.lightning_modules import Module, loader, off, trainer_of, weights
from zero.integrations.lightning import EMA, ZeroStrategy

DECAY = 0.8


def averaged(strategy: Any, callback: pl.Callback, **settings: Any) -> tuple[Module, pl.Trainer]:
    module, trainer = Module(), trainer_of(strategy, callbacks=[callback], **settings)
    trainer.fit(module, loader(), loader())
    return module, trainer


def average_body(context: Context, folder: str) -> None:
    for stage, every in ((2, 3), (3, 1)):
        weighted = EMAWeightAveraging(decay=DECAY, update_every_n_steps=every)
        plain, ddp = averaged("ddp", weighted, max_epochs=4)
        strategy = ZeroStrategy(zero.Config(stage=stage))
        module, trainer = averaged(strategy, EMA(DECAY, every), max_epochs=4)
        assert max(map(abs, map(float.__sub__, module.seen, plain.seen))) < 1e-6
        assert abs(float(trainer.callback_metrics["val"] - ddp.callback_metrics["val"])) < 1e-6
        assert off(weights(module), weights(plain)) < 1e-6

    path = f"{folder}/saved"
    averaged("zero", Saving(DECAY, path))
    resumed, trainer = Module(), trainer_of("zero", callbacks=[EMA(DECAY)], max_epochs=4)
    trainer.fit(resumed, loader(), loader(), ckpt_path=path)
    assert resumed.seen == module.seen[-len(resumed.seen) :]
    assert off(weights(resumed), weights(module)) == 0
    early, _ = averaged("zero", EMA(DECAY))
    assert off(weights(Module.load_from_checkpoint(f"{path}.weights")), weights(early)) == 0


class Saving(EMA):
    """Saves both ways after the second epoch."""

    def __init__(self, decay: float, path: str) -> None:
        super().__init__(decay)
        self.path = path

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.current_epoch == 1:
            trainer.save_checkpoint(self.path)
            trainer.save_checkpoint(f"{self.path}.weights", weights_only=True)


class Looking(EMA):
    """Looks at the average that training goes on with."""

    def __init__(self, decay: float, path: str) -> None:
        super().__init__(decay)
        self.path = path

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        assert self.average is not None
        with self.average.applied():
            found = trainer.strategy.engine.state_dict()
        wanted = Module.load_from_checkpoint(f"{self.path}.weights").state_dict()
        assert off(found, wanted) == 0


def other_ranks_body(context: Context, folder: str) -> None:
    looking = Looking(DECAY, f"{folder}/saved")
    trainer = trainer_of("zero", callbacks=[looking], max_epochs=3, devices=1)
    trainer.fit(Module(), loader(), loader(), ckpt_path=f"{folder}/saved")


def window_body(context: Context, folder: str) -> None:
    """Validation between the micro-batches of a step, a fit resumed there with another decay, and a path that
    one rank does not see."""
    path, settings = f"{folder}/window", {"accumulate_grad_batches": 2, "val_check_interval": 3}
    weighted = EMAWeightAveraging(decay=DECAY)
    plain, ddp = averaged("ddp", weighted, max_epochs=1, **settings)
    module, trainer = averaged("zero", EMA(DECAY), max_epochs=1, **settings)
    assert max(map(abs, map(float.__sub__, module.seen, plain.seen))) < 1e-6
    assert abs(float(trainer.callback_metrics["val"] - ddp.callback_metrics["val"])) < 1e-6
    assert off(weights(module), weights(plain)) < 1e-6
    trainer.save_checkpoint(path)  # with what has been adopted, and no average

    averaged("zero", Saving(DECAY, path), accumulate_grad_batches=2)
    counting = Counting(0.5)
    resumed = trainer_of("zero", callbacks=[counting], max_epochs=4, accumulate_grad_batches=2)
    resumed.fit(Module(), loader(), ckpt_path=path)
    assert counting.found == [(0.5, resumed.global_step)]

    unseen = path if context.rank == 0 else f"{path}-of-rank-1"
    with pytest.raises(zero.CheckpointError, match="window-of-rank-1"):
        EMA().saved_in(Path(unseen), resumed.strategy.engine)


class Counting(EMA):
    """Notes the decay and the number of updates, the first of which is the beginning."""

    found: list[tuple[float, int]]

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        assert self.average is not None
        self.found = [(self.average.decay, self.average.updates + 1)]
        super().on_train_end(trainer, module)


def test_the_average_is_lightnings(cluster: Clusters, tmp_path: Path) -> None:
    cluster(2).run(average_body, folder=str(tmp_path), limit=120)
    cluster(1).run(other_ranks_body, folder=str(tmp_path), limit=120)


def test_validation_between_micro_batches(cluster: Clusters, tmp_path: Path) -> None:
    cluster(2).run(window_body, folder=str(tmp_path), limit=120)
