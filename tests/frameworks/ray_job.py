"""A driver of Ray Train: `python ray_job.py FOLDER`. It prints, as JSON, what the example's run has left.

PYTHONPATH has the example, which the workers import, too.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import ray
import ray_train as example
import torch

RANKS, KILLED_IN = 2, 2


def train_and_die(settings: dict[str, Any]) -> None:
    """The example, in which rank 1 is killed once, in the middle of the run."""
    alive = example.train_epoch

    def train_epoch(engine: Any, optimizer: Any, epoch: int) -> float:
        died = Path(ray.train.get_context().get_storage().experiment_fs_path, "died")
        if (engine.rank, epoch) == (1, KILLED_IN) and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return alive(engine, optimizer, epoch)

    example.train_epoch = train_epoch
    example.train(settings)


def plain_losses() -> list[float]:
    """Rank 0's last loss in each epoch of training without ranks, with the mean of their gradients."""
    model, optimizer = example.build()
    found = []
    for epoch in range(example.EPOCHS):
        for shares in zip(*(example.batches(epoch, rank) for rank in range(RANKS)), strict=True):
            losses = [(model(x) - x).square().mean() for x in shares]
            torch.stack(losses).mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        found.append(losses[0].item())
    return found


def main(folder: str) -> None:
    ray.init(num_cpus=RANKS, include_dashboard=False)
    result = example.trainer_of(train_and_die, folder, RANKS).fit()
    told = {
        "plain": plain_losses(),
        "last": result.metrics,
        "checkpoint": Path(result.checkpoint.path).name,
        "there": sorted(path.name for path in Path(folder, "zero").iterdir()),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1])
