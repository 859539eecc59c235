"""Ray Train: TorchTrainer starts the workers, and starts them anew from the newest checkpoint if one is lost.

    python examples/launch/ray_train.py /shared/runs 2

The folder is on a file system that all machines share: every worker writes its share of a checkpoint there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train import (
    Checkpoint,
    CheckpointConfig,
    CheckpointUploadMode,
    FailureConfig,
    RunConfig,
    ScalingConfig,
)
from ray.train.torch import TorchTrainer
from torch import Tensor, nn
from torch.optim import Optimizer

import zero

EPOCHS, STEPS = 4, 8


def build() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4))
    model = nn.Sequential(*blocks)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def batches(epoch: int, rank: int) -> list[Tensor]:
    """A rank's share of an epoch's data: STEPS tensors [8, 32]."""
    generator = torch.Generator().manual_seed(1000 * epoch + rank)
    return [torch.randn(8, 32, generator=generator) for _ in range(STEPS)]


def train_epoch(engine: zero.Engine, optimizer: Optimizer, epoch: int) -> float:
    """An ordinary loop; returns this rank's last loss."""
    model = engine.module
    for batch in batches(epoch, engine.rank):
        x = batch.to(engine.device)
        loss = (model(x) - x).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def train(settings: dict[str, Any]) -> None:
    """What each worker runs. It goes on from the checkpoint that Ray gives it, if there is one."""
    model, optimizer = build()
    engine = zero.initialize(model, optimizer, zero.Config(stage=3))
    newest, first = ray.train.get_checkpoint(), 0
    if newest is not None:
        first = engine.load_checkpoint(newest.path).state["epoch"] + 1
    for epoch in range(first, settings["epochs"]):
        loss = train_epoch(engine, optimizer, epoch)
        # Where Ray itself would put a checkpoint, so that there is nothing to upload.
        folder = Path(ray.train.get_context().get_storage().experiment_fs_path, f"epoch-{epoch}")
        engine.save_checkpoint(folder, {"epoch": epoch})
        ray.train.report(
            {"epoch": epoch, "loss": loss},
            checkpoint=Checkpoint(folder),
            checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,
        )


def trainer_of(loop: Callable[[dict[str, Any]], None], folder: str, workers: int) -> TorchTrainer:
    return TorchTrainer(
        loop,
        train_loop_config={"epochs": EPOCHS},
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=torch.cuda.is_available()),
        run_config=RunConfig(
            name="zero",  # a run of the same name and folder goes on where that one ended
            storage_path=folder,
            failure_config=FailureConfig(max_failures=3),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )


def main(folder: str, workers: str) -> None:
    print(trainer_of(train, folder, int(workers)).fit().metrics)


if __name__ == "__main__":
    main(*sys.argv[1:])
