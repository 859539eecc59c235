"""A module that is fitted more than once, by Trainers and by the Tuner, as in Lightning's own DDP."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.tuner import Tuner
from torch import Tensor

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.frameworks.lightning_modules import Module, loader, off, trainer_of, weights
from zero.integrations.lightning import ZeroStrategy


class Tuned(Module):
    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.01

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def fitted(strategy: Any, folder: Path) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of a search for the learning rate and of three fits after it, and the last weights."""
    torch.manual_seed(3)
    folder.mkdir(exist_ok=True)
    module, trainer = Tuned(), trainer_of(strategy, folder, max_epochs=4)
    found = Tuner(trainer).lr_find(module, loader(), num_training=16, early_stop_threshold=None)
    assert found is not None
    assert module.lr == found.suggestion() != 0.01
    module.seen = list(found.results["loss"])
    trainer.fit(module, loader())
    trainer.fit_loop.max_epochs = 5
    trainer.fit(module, loader())
    trainer_of(strategy if isinstance(strategy, str) else ZeroStrategy(), max_epochs=1).fit(module, loader())
    assert os.listdir(folder) == []
    return module.seen, weights(module)


def refit_body(context: Context, folder: str, stage: int, precision: Any) -> tuple[float, float]:
    plain, there = fitted("ddp", Path(folder, "ddp"))
    strategy = ZeroStrategy(zero.Config(stage=stage, precision=precision))
    losses, here = fitted(strategy, Path(folder, "zero"))
    assert len(losses) == len(plain) == 16 + (4 + 1 + 1) * 5
    return max(map(abs, map(float.__sub__, losses, plain))), off(there, here)


@pytest.mark.parametrize(("stage", "precision", "limit"), [(2, "model", 1e-6), (3, "bf16", 2e-2)])
def test_losses_and_weights_of_several_fits(
    cluster: Clusters, tmp_path: Path, stage: int, precision: str, limit: float
) -> None:
    arguments = {"folder": str(tmp_path), "stage": stage, "precision": precision}
    for losses, values in cluster(2).run(refit_body, limit=120, **arguments):
        assert losses < limit
        assert values < limit
