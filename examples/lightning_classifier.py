"""An image classifier under Lightning: torchrun --nproc-per-node 2 lightning_classifier.py

What differs from a program without zero is the strategy, and that the network is made in configure_model, so
that it is born sharded. Needs lightning.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import zero
from zero.integrations.lightning import ZeroStrategy


class Classifier(pl.LightningModule):
    def configure_model(self) -> None:
        if not hasattr(self, "net"):  # it is called for every stage
            self.net = torch.nn.Sequential(
                torch.nn.Conv2d(1, 16, 3, padding=1),
                torch.nn.GELU(),
                torch.nn.Conv2d(16, 16, 3, padding=1, stride=2),
                torch.nn.GELU(),
                torch.nn.Flatten(),
                torch.nn.Linear(16 * 4 * 4, 4),
            )

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        images, kinds = batch
        return cross_entropy(self.net(images), kinds)

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        images, kinds = batch
        right = (self.net(images).argmax(1) == kinds).float().mean()
        self.log("accuracy", right, sync_dist=True, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def images(number: int, seed: int) -> TensorDataset:
    """Noise of (1, 8, 8), brighter in the quarter that is to be found. Your images go here."""
    generator = torch.Generator().manual_seed(seed)
    noise, kinds = torch.randn(number, 1, 8, 8, generator=generator), torch.arange(number) % 4
    for image, kind in zip(noise, kinds.tolist(), strict=True):
        row, column = divmod(kind, 2)
        image[:, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] += 1.5
    return TensorDataset(noise, kinds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/images"))
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--devices", type=int, default=2)
    given = parser.parse_args()

    pl.seed_everything(0, verbose=False)
    trainer = pl.Trainer(
        strategy=ZeroStrategy(zero.Config(stage=3)),
        devices=given.devices,
        max_epochs=given.epochs,
        gradient_clip_val=1.0,
        default_root_dir=given.out,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(Classifier(), DataLoader(images(256, 1), 16, shuffle=True), DataLoader(images(64, 2), 16))
    trainer.save_checkpoint(given.out / "last.ckpt")
    if trainer.is_global_zero:
        print(f"accuracy {trainer.callback_metrics['accuracy'].item():.3f}")


main()
