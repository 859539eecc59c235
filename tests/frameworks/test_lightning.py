"""zero.integrations.lightning beside the Trainer's own DDP, with the real library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import DeviceStatsMonitor, EMAWeightAveraging, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.frameworks.lightning_modules import Module, Wide, loader, off, trainer_of, weights
from zero.integrations.lightning import ZeroStrategy

EXACT, HALF = 1e-6, 1e-3


def fitted(strategy: Any, **settings: Any) -> dict[str, Any]:
    """What a fit with validation, a test and a prediction leave."""
    module, trainer = Module(), trainer_of(strategy, **settings)
    trainer.fit(module, loader(), loader())
    val = trainer.callback_metrics["val"]
    (tested,) = trainer.test(module, loader(), verbose=False)
    predicted = torch.cat([each.float() for each in trainer.predict(module, loader()) or ()])
    told = {"losses": module.seen, "norms": module.norms, "val": [float(val)], "test": [*tested.values()]}
    return told | {"weights": weights(module), "predicted": predicted, "steps": trainer.global_step}


def distances(one: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    assert one["steps"] == other["steps"]
    assert len(one["losses"]) == len(other["losses"])
    found = {
        name: max(map(abs, map(float.__sub__, one[name], other[name])))
        for name in ("losses", "norms", "val", "test")
    }
    return found | {
        "weights": off(one["weights"], other["weights"]),
        "predicted": float((one["predicted"] - other["predicted"]).abs().max()),
    }


def parity_body(context: Context, **settings: Any) -> list[dict[str, float]]:
    plain = fitted("ddp", **settings)
    return [distances(plain, fitted(ZeroStrategy(zero.Config(stage=s)), **settings)) for s in (2, 3)]


@pytest.mark.parametrize(
    ("limit", "settings"),
    [
        (EXACT, {}),
        (EXACT, {"accumulate_grad_batches": 3}),  # of five batches an epoch
        (EXACT, {"gradient_clip_val": 0.01}),
        (EXACT, {"gradient_clip_val": 0.001, "gradient_clip_algorithm": "value"}),
        (HALF, {"precision": "bf16-mixed"}),
    ],
)
def test_ddps_losses_norms_and_weights(cluster: Clusters, limit: float, settings: dict[str, Any]) -> None:
    for stages in cluster(2).run(parity_body, limit=90, **settings):
        for found in stages:
            found["predicted"] /= 4  # of a value near 1, half of bf16's last bit
            assert {name: by for name, by in found.items() if not by < limit} == {}


def precision_body(context: Context) -> dict[str, Any]:
    """What trains otherwise than in DDP: masters are kept in fp32, and the host has a scaler for fp16."""
    found: dict[str, Any] = {}
    for precision in ("bf16-true", "16-mixed"):
        module = Module()
        trainer = trainer_of(ZeroStrategy(), accelerator="accelz", precision=precision)
        trainer.fit(module, loader())
        found[precision] = module.seen[0], module.seen[-1], module.net[0].weight.dtype
    scaler = trainer.precision_plugin.scaler
    strategy = ZeroStrategy(zero.Config(precision="fp16", loss_scale=64.0))
    trainer_of(strategy).fit(module := Module(), loader())
    return found | {
        "scaler": scaler.get_scale(),
        "engine": (module.seen[-1], float(strategy.engine.loss_scale)),
    }


def test_precisions(cluster: Clusters) -> None:
    for found in cluster(2).run(precision_body):
        first, last, dtype = found["bf16-true"]
        assert dtype is torch.bfloat16
        assert last < first / 2
        first, last, dtype = found["16-mixed"]
        assert dtype is torch.float32
        assert last < first / 2
        assert found["scaler"] > 1
        assert abs(found["engine"][0] - last) < 0.01
        assert found["engine"][1] == 64


class Adversaries(Module):
    """Two optimizers, stepped in turn."""

    def __init__(self, toggled: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.toggled = toggled

    def build(self) -> None:
        self.maker = nn.Linear(6, 6)
        self.judge = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))

    def training_step(self, batch: list[Tensor], index: int) -> None:
        optimizers: Any = self.optimizers()
        for number, optimizer in enumerate(optimizers):
            if self.toggled:
                self.toggle_optimizer(optimizer)
            else:
                optimizer.zero_grad()
            made = self.judge(self.maker(batch[0])).mean()
            loss = self.judge(batch[0]).mean() - made if number == 0 else made
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 0.1, "norm")
            optimizer.step()
            self.seen.append(loss.item())
            if self.toggled:
                optimizer.zero_grad()
                self.untoggle_optimizer(optimizer)
        for scheduler in self.lr_schedulers():  # type: ignore[union-attr]
            scheduler.step()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        pass

    def configure_optimizers(self) -> Any:
        judges = torch.optim.SGD(self.judge.parameters(), lr=0.1)
        makers = torch.optim.Adam(self.maker.parameters(), lr=0.05)
        return [judges, makers], [torch.optim.lr_scheduler.StepLR(each, 1, 0.9) for each in (judges, makers)]


def manual_body(context: Context, toggled: bool) -> list[float]:
    def train(strategy: Any) -> Adversaries:
        trainer_of(strategy).fit(module := Adversaries(toggled), loader())
        return module

    plain, found = train("ddp_find_unused_parameters_true"), []
    for stage in (2, 3):
        module = train(ZeroStrategy(zero.Config(stage=stage)))
        assert len(module.seen) == len(plain.seen)
        found += [off(weights(plain), weights(module)), *map(float.__sub__, plain.seen, module.seen)]
    return found


@pytest.mark.parametrize("toggled", [False, True])
def test_several_optimizers_in_manual_optimization(cluster: Clusters, toggled: bool) -> None:
    for found in cluster(2).run(manual_body, toggled=toggled):
        assert max(map(abs, found)) < EXACT


class Born(Wide):
    def build(self) -> None:
        self.net = nn.Sequential()

    def configure_model(self) -> None:
        if not self.net:
            torch.manual_seed(0)
            super().build()

    def configure_optimizers(self) -> Any:
        if isinstance(self.trainer.strategy, ZeroStrategy):
            with pytest.raises(zero.ShardedParameterError):
                self.net[0].weight.sum()  # has no values yet
        return super().configure_optimizers()


def born_body(context: Context) -> None:
    trainer_of(ZeroStrategy()).fit(plain := Wide(), loader())
    trainer = trainer_of(ZeroStrategy())
    trainer.fit(born := Born(), loader())
    trainer.test(born, loader(), verbose=False)
    assert born.seen == plain.seen
    assert off(weights(born), weights(plain)) == 0
    trainer_of("ddp", precision="bf16-true").fit(plain := Born(), loader())
    trainer_of(ZeroStrategy(), precision="bf16-true").fit(born := Born(), loader())
    assert born.seen[0] == plain.seen[0]
    assert born.net[0].weight.dtype is torch.bfloat16


def test_configure_model_is_born_sharded(cluster: Clusters) -> None:
    cluster(2).run(born_body)


def face_body(context: Context) -> None:
    """Names, devices, and what is refused."""
    trainer = trainer_of("zero", accelerator="accelz")
    assert isinstance(trainer.strategy, ZeroStrategy)
    with pytest.raises(zero.UsageError, match="no engine yet"):
        _ = trainer.strategy.engine
    module = Module()
    (before,) = trainer.validate(module, loader(), verbose=False)
    assert trainer.strategy.engine.module is module  # sharded without an optimizer
    trainer.fit(module, loader(), loader())
    assert trainer.callback_metrics["val"] < before["val"] / 2
    assert module.device == trainer.strategy.engine.device
    assert trainer.accelerator.get_device_stats(module.device)["memory.capacity"] > 0
    trainer_of("zero").test(module, loader(), verbose=False)  # another Trainer finds the engine
    with pytest.raises(zero.ConfigError, match="accumulate_grad_batches"):
        ZeroStrategy(zero.Config(gradient_accumulation_steps=2))
    with pytest.raises(zero.ConfigError, match="takes no find_unused_parameters"):
        ZeroStrategy(find_unused_parameters=True)
    with pytest.raises(zero.UsageError, match="devices and num_nodes make 3"):
        trainer_of("zero", devices=3).fit(Module(), loader())

    with pytest.raises(zero.ConfigError, match=r"lightning\.EMA"):
        trainer_of("zero", callbacks=[EMAWeightAveraging()]).fit(Module(), loader())


class Normed(Module):
    def build(self) -> None:
        super().build()
        self.net.append(nn.BatchNorm1d(3))


def companions_body(context: Context, folder: str) -> None:
    """What else Trainers have: loggers, monitors, converted normalisation, compiled models."""
    monitors = [LearningRateMonitor(), DeviceStatsMonitor()]
    logger = CSVLogger(folder, version=context.rank)
    settings: dict[str, Any] = {"accelerator": "accelz", "logger": logger, "log_every_n_steps": 1}
    trainer_of("zero", callbacks=monitors, **settings).fit(Module(), loader())
    logged = Path(logger.log_dir, "metrics.csv") if context.rank == 0 else None
    for column in ("loss", "lr-AdamW", "memory.peak"):
        assert logged is None or column in logged.read_text().splitlines()[0]

    trainer_of("zero", sync_batchnorm=True).validate(normed := Normed(), loader(), verbose=False)
    assert isinstance(normed.net[-1], nn.SyncBatchNorm)

    compiled = ZeroStrategy(zero.Config(compile=zero.Compile(inner="aot_eager")))
    trainer_of(compiled).fit(module := Wide(), loader(), loader())
    trainer_of("zero").fit(plain := Wide(), loader(), loader())
    assert module.seen == plain.seen
    assert "compiled" in str(compiled.engine.explain())


def test_loggers_monitors_and_compilation(cluster: Clusters, tmp_path: Path) -> None:
    cluster(2).run(companions_body, folder=str(tmp_path), limit=150)


def test_names_and_refusals(cluster: Clusters) -> None:
    cluster(2).run(face_body)
