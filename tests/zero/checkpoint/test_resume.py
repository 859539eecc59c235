"""Saving and going on: exact at the same world size, the same values at any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.resumed_job import OPTIMIZERS, Job


def resume_body(context: Context, path: str, optimizer: str, async_: bool, **settings: Any) -> dict[str, Any]:
    job = Job(context, optimizer, fresh=True, **settings)
    job.train(4)
    job.save(path, async_=async_)
    straight = job.train(4)
    job.engine.wait_for_checkpoint()
    weights = job.engine.state_dict(master=True)
    resumed = Job(context, optimizer, fresh=False, **settings)
    loaded = resumed.load(path)
    losses = resumed.train(4)
    again = resumed.engine.state_dict(master=True)
    return {
        "losses": (straight, losses),
        "weights": all(torch.equal(value, again[name]) for name, value in weights.items()),
        "rates": [g["lr"] for g in resumed.engine.optimizer.param_groups]
        == [g["lr"] for g in job.engine.optimizer.param_groups],
        "loaded": (loaded.steps, loaded.world_size, loaded.state["note"], loaded.rank_states),
    }


SETTINGS: list[dict[str, Any]] = [
    {"stage": 3},
    {"stage": 3, "async_": True},
    {"stage": 0},
    {"stage": 1, "clip_norm": 0.5},
    {"stage": 2, "precision": "bf16"},
    {"stage": 3, "precision": "bf16", "async_": True},
    {"stage": 3, "precision": "fp16"},
    {"stage": 3, "persistent_below": 100},
    *({"stage": 3, "optimizer": name} for name in OPTIMIZERS if name != "adamw"),
    {"stage": 0, "optimizer": "adafactor"},
    {"stage": 3, "optimizer": "adafactor", "precision": "bf16", "async_": True},
    {"stage": 0, "optimizer": "nadam"},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(map(str, s.values())))
def test_resume_is_exact(cluster: Clusters, tmp_path: Path, settings: dict[str, Any]) -> None:
    arguments = {"optimizer": "adamw", "async_": False, **settings}
    for found in cluster(2).run(resume_body, path=str(tmp_path / "runs" / "step-4"), **arguments):
        straight, resumed = found["losses"]
        assert straight == resumed
        assert found["weights"]
        assert found["rates"]
        assert found["loaded"] == (4, 2, (1, {2: "two"}), ({"rank": 0}, {"rank": 1}))
