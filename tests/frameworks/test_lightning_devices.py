"""Any accelz backend in Lightning, and Lightning's own way to start ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

import zero
from accelz.conformance.cluster import Cluster, Clusters, Context
from tests.frameworks.lightning_modules import Wide, loader, off, trainer_of, weights
from zero.integrations.lightning import AccelzAccelerator

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def simulated() -> Iterator[Cluster]:
    pytest.importorskip("accelz_sim")
    made = Cluster("sim", 2)
    yield made
    made.stop()


def trained_body(context: Context, folder: str) -> tuple[float, dict[str, torch.Tensor], str]:
    settings: dict[str, Any] = {"accelerator": "accelz", "gradient_clip_val": 0.05}
    first = trainer_of("zero", **settings)
    first.fit(Wide(), loader())
    first.save_checkpoint(f"{folder}/{context.accelerator.name}")
    trainer = trainer_of("zero", max_epochs=4, **settings)
    trainer.fit(module := Wide(), loader(), loader(), ckpt_path=f"{folder}/{context.accelerator.name}")
    value, kind = float(trainer.callback_metrics["val"]), str(module.device.type)
    return value, {name: each.cpu() for name, each in weights(module).items()}, kind


def test_a_device_that_lightning_does_not_know(cluster: Clusters, simulated: Cluster, tmp_path: Path) -> None:
    value, plain, _ = cluster(2).run(trained_body, folder=str(tmp_path))[0]
    for found, parameters, kind in simulated.run(trained_body, folder=str(tmp_path)):
        assert kind == "sim"
        assert abs(found - value) < 1e-6
        assert off(parameters, plain) < 1e-6


class Placed(Wide):
    place = ""

    def on_train_start(self) -> None:
        self.place = self.device.type


def refused_body(context: Context) -> None:
    with pytest.raises(RuntimeError, match="accelerator='accelz'"):
        trainer_of("zero", accelerator="cpu").fit(Wide(), loader())
    with pytest.raises(zero.UsageError, match="SingleDeviceStrategy\\(device='sim'\\)"):
        trainer_of("auto", accelerator="accelz", devices=1).fit(Wide(), loader())
    trainer_of(SingleDeviceStrategy("sim"), accelerator="accelz", devices=1).fit(module := Placed(), loader())
    assert module.place == "sim"


def test_another_device_than_accelzs(simulated: Cluster) -> None:
    simulated.run(refused_body)


def test_devices_are_numbers() -> None:
    assert AccelzAccelerator.parse_devices("auto") == AccelzAccelerator.auto_device_count() == 1
    assert AccelzAccelerator.parse_devices("3") == 3
    assert len(AccelzAccelerator.get_parallel_devices(3)) == 3


SCRIPT = """
from tests.frameworks.lightning_modules import Wide, loader, trainer_of
import zero.integrations.lightning

trainer = trainer_of("zero")
trainer.fit(module := Wide(), loader())
engine = trainer.strategy.engine
if trainer.is_global_zero:
    print(f"trained on {engine.world_size} ranks: {module.seen[-1]:.6f}")
"""


def test_lightnings_own_launcher(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script)]
    ran = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=240)
    assert "trained on 2 ranks" in ran.stdout
