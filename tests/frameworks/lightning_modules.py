"""A module, its data and Trainers, for the tests of zero.integrations.lightning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import zero


class Module(pl.LightningModule):
    """A small network, with a parameter of its own that only steps use. seen: losses; norms: of gradients."""

    def __init__(self, lr: float = 0.05, fails_on: tuple[int, int] | None = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.build()
        self.seen: list[float] = []
        self.norms: list[float] = []

    def build(self) -> None:
        layers = (nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))
        self.net = nn.Sequential(*layers)
        self.scale = nn.Parameter(torch.ones(3))

    def loss(self, batch: list[Tensor]) -> Tensor:
        return (self.net(batch[0]) * self.scale - 0.3).square().mean()

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        if self.hparams["fails_on"] == (self.global_rank, self.global_step):
            self.fail()
        loss = self.loss(batch)
        self.seen.append(loss.item())
        self.log("loss", loss)
        return loss

    def fail(self) -> None:
        raise ArithmeticError(f"on rank {self.global_rank}")

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        norms = [p.grad.norm() for p in self.parameters() if p.grad is not None]
        self.norms.append(torch.stack(norms).norm().item())

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: list[Tensor], index: int) -> Tensor:
        return self.net(batch[0]) * self.scale

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Wide(Module):
    """Large enough that its parameters are deferred where they are born sharded."""

    def build(self) -> None:
        self.net = nn.Sequential(nn.Linear(6, 1000), nn.Tanh(), nn.Linear(1000, 3))
        self.scale = nn.Parameter(torch.ones(3))


def weights(module: nn.Module) -> dict[str, Tensor]:
    """The whole parameters; collective if they are sharded."""
    with zero.gathered(module):
        return {name: value.detach().float().clone() for name, value in module.named_parameters()}


def off(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference."""
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def loader(samples: int = 40) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(samples, 6, generator=generator)), batch_size=4)


def trainer_of(strategy: Any, folder: str | Path | None = None, **settings: Any) -> pl.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    usual = {"accelerator": "cpu", "devices": 2, "max_epochs": 2, "enable_checkpointing": False}
    return pl.Trainer(strategy=strategy, default_root_dir=folder, **(quiet | usual | settings))
