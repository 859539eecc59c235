"""zero.integrations.fabric beside Fabric's own DDP, with the real library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.frameworks.lightning_modules import off, weights
from zero.integrations.fabric import ZeroStrategy

PARTS = 3
"""Micro-batches of a step."""
EXACT, HALF = 1e-6, 1e-3


def fabric_of(strategy: Any, **settings: Any) -> Fabric:
    fabric = Fabric(strategy=strategy, **({"accelerator": "cpu", "devices": 2} | settings))
    fabric.launch()
    return fabric


def network(width: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3))


class Run:
    """A model with its optimizer and scheduler in an ordinary loop of Fabric's."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric, model = fabric, network()
        adamw = torch.optim.AdamW(model.parameters(), lr=0.05)
        self.scheduler = StepLR(adamw, 1, 0.8)
        self.model, self.optimizer = fabric.setup(model, adamw)
        self.losses: list[float] = []
        self.norms: list[float] = []

    @property
    def state(self) -> dict[str, Any]:
        objects = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        return {**objects, "losses": self.losses}

    def train(self, steps: int, **clip: float) -> Run:
        for step in range(len(self.losses) // PARTS, len(self.losses) // PARTS + steps):
            for part in range(PARTS):
                generator = torch.Generator().manual_seed(100 * step + 10 * part + self.fabric.global_rank)
                batch = torch.randn(4, 6, generator=generator).to(self.fabric.device)
                with self.fabric.no_backward_sync(self.model, enabled=part < PARTS - 1):
                    loss = (self.model(batch).float() - 0.3).square().mean() / PARTS
                    self.fabric.backward(loss)
                self.losses.append(loss.item())
            norm = self.fabric.clip_gradients(self.model, self.optimizer, **clip) if clip else None
            self.norms += [] if norm is None else [float(norm)]
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        return self


def far(one: list[float], other: list[float]) -> float:
    return max(map(abs, map(float.__sub__, one, other)), default=0.0)


def parity_body(context: Context, clip: dict[str, float], **settings: Any) -> list[float]:
    plain, found = Run(fabric_of("ddp", **settings)).train(3, **clip), []
    for stage in (2, 3):
        run = Run(fabric_of(ZeroStrategy(zero.Config(stage=stage)), **settings)).train(3, **clip)
        values = dict(zip(weights(run.model), weights(plain.model).values(), strict=True))
        found += [far(plain.losses, run.losses), far(plain.norms, run.norms), off(weights(run.model), values)]
    return found


@pytest.mark.parametrize(
    ("limit", "clip", "settings"),
    [
        (EXACT, {}, {}),
        (EXACT, {"max_norm": 0.01}, {}),
        (EXACT, {"max_norm": 0.01, "norm_type": float("inf")}, {}),
        (EXACT, {"clip_val": 0.001}, {}),
        (HALF, {"max_norm": 0.01}, {"precision": "bf16-mixed"}),
    ],
)
def test_ddps_losses_norms_and_weights(
    cluster: Clusters, limit: float, clip: dict[str, float], settings: dict[str, Any]
) -> None:
    for found in cluster(2).run(parity_body, limit=90, clip=clip, **settings):
        assert max(found) < limit


def resumed_body(context: Context, folder: str) -> None:
    """A run that is saved, gone on with by another, and read in part."""
    fabric, path = fabric_of("zero"), f"{folder}/saved"
    whole = Run(fabric).train(5)
    fabric.save(path, Run(fabric).train(2).state | {"note": {"of": "two"}})
    resumed = Run(fabric_of(ZeroStrategy(zero.Config(stage=2))))
    state = resumed.state
    assert resumed.fabric.load(path, state) == {"note": {"of": "two"}}
    resumed.losses = state["losses"]  # rank 0's
    assert resumed.train(3).losses[2 * PARTS :] == whole.losses[2 * PARTS :]
    assert off(weights(resumed.model), weights(whole.model)) == 0
    assert resumed.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"]

    read = Run(fabric)
    with pytest.raises(zero.CheckpointError, match="no 'epoch'"):
        fabric.load(path, {"model": read.model, "epoch": 0})
    state = {"model": read.model, "epoch": 7}
    fabric.load(path, state, strict=False)  # no optimizer: the weights only
    assert state["epoch"] == 7
    assert fabric.strategy.engine_of(read.model).steps == 0
    with pytest.raises(zero.UsageError, match="load it with the model"):
        fabric.load(path, {"epoch": 0})


def test_a_resumed_run_is_the_uninterrupted_one(cluster: Clusters, tmp_path: Path) -> None:
    cluster(2).run(resumed_body, folder=str(tmp_path))


def saved_body(context: Context, folder: str) -> None:
    """Parts of a model, whole weights in files, and states without a model."""
    fabric = fabric_of("zero")
    run = Run(fabric).train(1)
    kept: dict[str, Any] = {"model": lambda name, value: name.startswith("2.") and value.ndim == 2}
    fabric.save(f"{folder}/part", {"model": run.model}, filter=kept)
    loaded = fabric.strategy.engine_of(run.model).load_checkpoint(f"{folder}/part")
    assert "0.weight" in loaded.left_out
    assert "2.weight" not in loaded.left_out
    with pytest.raises(zero.ConfigError, match="filter"):
        fabric.save(f"{folder}/x", run.state, filter={"scheduler": lambda *_: True})

    fabric.save(
        f"{folder}/file", {"epoch": 3, "weights": fabric.strategy.get_module_state_dict(run.model.module)}
    )
    read = fabric.load(f"{folder}/file")
    assert read["epoch"] == 3
    plain = network()
    plain.load_state_dict(read["weights"])
    torch.save(read["weights"], f"{folder}/weights-{context.rank}")
    other = Run(fabric)
    fabric.load_raw(f"{folder}/weights-{context.rank}", other.model)
    assert off(weights(other.model), weights(run.model)) == 0
    assert off(dict(plain.named_parameters()), weights(run.model.module)) == 0

    another = Run(fabric)
    with pytest.raises(zero.UsageError, match="'a', 'b' has an engine"):
        fabric.save(f"{folder}/y", {"a": run.model, "b": another.model})


def test_what_is_saved(cluster: Clusters, tmp_path: Path) -> None:
    cluster(2).run(saved_body, folder=str(tmp_path))


def apart_body(context: Context) -> None:
    """A model set up without its optimizer: read, then trained; and one that is born sharded."""
    fabric = fabric_of("zero", accelerator="accelz")
    plain = Run(fabric)
    model = fabric.setup_module(network())
    with torch.no_grad():
        assert torch.equal(model(torch.ones(1, 6)), plain.model(torch.ones(1, 6)))
    foreign = torch.optim.SGD(network().parameters())
    with pytest.raises(zero.UsageError, match="no model that was set up"):
        fabric.setup_optimizers(foreign)
    apart = Run.__new__(Run)
    adamw = torch.optim.AdamW(model.parameters(), lr=0.05)
    apart.fabric, apart.model, apart.scheduler = fabric, model, StepLR(adamw, 1, 0.8)
    apart.optimizer, apart.losses, apart.norms = fabric.setup_optimizers(adamw), [], []
    assert apart.train(2, max_norm=0.01).losses == plain.train(2, max_norm=0.01).losses

    half = fabric_of("zero", precision="bf16-true")
    with half.init_module():
        born = network(1000)
    with pytest.raises(zero.ShardedParameterError):
        born[0].weight.sum()  # type: ignore[index,operator]
    optimizer = torch.optim.AdamW(born.parameters())
    model, _ = half.setup(born, optimizer)
    assert model(torch.ones(1, 6)).dtype is torch.float32
    assert born[0].weight.dtype is torch.bfloat16  # type: ignore[index]


def test_a_model_without_its_optimizer(cluster: Clusters) -> None:
    cluster(2).run(apart_body)


def scaled_body(context: Context) -> tuple[Tensor, float]:
    fabric = fabric_of("zero", accelerator="accelz", precision="16-mixed")
    run = Run(fabric).train(4, max_norm=0.1)
    scaler: Any = fabric.strategy.precision.scaler  # type: ignore[attr-defined]
    return scaler.get_scale(), run.losses[-1] / run.losses[0]


def test_fp16_is_scaled(cluster: Clusters) -> None:
    for scale, progress in cluster(2).run(scaled_body):
        assert scale > 1
        assert progress < 0.8


def refused_body(context: Context) -> None:
    with pytest.raises(zero.ConfigError, match=r"Fabric's loop says when"):
        ZeroStrategy(zero.Config(gradient_accumulation_steps=2))
    with pytest.raises(zero.UsageError, match="devices and num_nodes make 3"):
        fabric_of("zero", devices=3)
    with pytest.raises(zero.ConfigError, match="number of devices"):
        fabric_of("zero", accelerator="accelz", devices=[0, 1])
    fabric = fabric_of("zero")
    with pytest.raises(zero.UsageError, match=r"fabric\.setup"):
        fabric.strategy.engine_of(network())


def test_refusals(cluster: Clusters) -> None:
    cluster(2).run(refused_body)
