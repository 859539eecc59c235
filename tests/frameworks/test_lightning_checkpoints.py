"""Checkpoints of zero.integrations.lightning: ModelCheckpoint, resuming, whole weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.frameworks.lightning_modules import Module, loader, off, trainer_of, weights
from zero.integrations.lightning import ZeroStrategy

EPOCHS = 4


def keeping(folder: str) -> ModelCheckpoint:
    return ModelCheckpoint(folder, "{step}", monitor="val", save_top_k=2, save_last=True)


def saved_body(context: Context, folder: str, background: bool) -> None:
    plugins: Any = [AsyncCheckpointIO()] if background else []
    kept = keeping(folder)
    whole, settings = Module(), {"enable_checkpointing": True, "plugins": plugins}
    trainer_of("zero", callbacks=[kept], max_epochs=EPOCHS, **settings).fit(whole, loader(), loader())
    names = {Path(path).name for path in kept.best_k_models}
    assert set(os.listdir(folder)) == names | {"last.ckpt", "latest"}
    assert len(names) == 2

    first, last = Module(), f"{folder}/half/last.ckpt"
    trainer_of("zero", callbacks=[keeping(f"{folder}/half")], **settings).fit(first, loader(), loader())
    second, strategy = Module(), ZeroStrategy(zero.Config(stage=2))
    trainer = trainer_of(strategy, callbacks=[keeping(f"{folder}/half")], max_epochs=EPOCHS, **settings)
    trainer.fit(second, loader(), loader(), ckpt_path=last)
    assert first.seen + second.seen == whole.seen
    assert first.norms + second.norms == whole.norms
    assert off(weights(second), weights(whole)) == 0
    assert trainer.global_step == EPOCHS * 5
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.05 * 0.5**EPOCHS

    best = trainer.test(ckpt_path="best", dataloaders=loader(), verbose=False)
    assert best[0]["val"] == float(kept.best_model_score)  # type: ignore[arg-type]
    read = Module()  # never fitted
    (found,) = trainer_of("zero").test(read, loader(), ckpt_path=kept.best_model_path, verbose=False)
    assert found == best[0]


@pytest.mark.parametrize("background", [False, True])
def test_top_k_last_and_resume(cluster: Clusters, tmp_path: Path, background: bool) -> None:
    cluster(2).run(saved_body, folder=str(tmp_path), background=background)


def files_body(context: Context, folder: str) -> None:
    """Single files: weights for everybody, and what another strategy has saved."""
    trainer, module = trainer_of("zero"), Module(lr=0.02)
    trainer.fit(module, loader(), loader())
    trainer.save_checkpoint(f"{folder}/weights.ckpt", weights_only=True)
    plain = Module.load_from_checkpoint(f"{folder}/weights.ckpt")
    assert plain.hparams["lr"] == 0.02
    assert off(weights(plain), weights(module)) == 0
    (found,) = trainer.test(module, loader(), verbose=False)
    other = trainer_of("zero").test(Module(), loader(), ckpt_path=f"{folder}/weights.ckpt", verbose=False)
    assert other == [found]

    ddp = trainer_of("ddp")
    ddp.fit(Module(), loader())
    ddp.save_checkpoint(f"{folder}/ddp.ckpt")
    with pytest.raises(zero.StateError, match="another strategy"):
        trainer_of("zero").fit(Module(), loader(), ckpt_path=f"{folder}/ddp.ckpt")
    trainer_of("zero").test(Module(), loader(), ckpt_path=f"{folder}/ddp.ckpt", verbose=False)
    trainer.strategy.engine.save_checkpoint(f"{folder}/engines")
    with pytest.raises(zero.CheckpointError, match="not by a Trainer"):
        trainer.test(module, loader(), ckpt_path=f"{folder}/engines", verbose=False)
    with pytest.raises(zero.ConfigError, match="storage_options"):
        trainer.save_checkpoint(f"{folder}/x.ckpt", storage_options={})


def test_single_files(cluster: Clusters, tmp_path: Path) -> None:
    cluster(2).run(files_body, folder=str(tmp_path))
