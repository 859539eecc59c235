"""Memory goes with the engine, the model and the optimizer, without a garbage collection."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.models import device_of
from tests.zero.helpers.training import adamw, collected
from zero.optimizer.sharded_optimizer import ShardedOptimizer
from zero.sharding.flat_group import FlatGroup

WIDTH = 16


@contextmanager
def no_collection() -> Iterator[None]:
    """Nothing in cycles goes in the block, nor what was made before it."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def layers() -> nn.Module:
    torch.manual_seed(3)
    blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 1))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def trained(config: zero.Config, optimizer: Callable[[nn.Module], torch.optim.Optimizer]) -> zero.Engine:
    model = layers()
    engine = zero.initialize(model, optimizer(model), config)
    for _ in range(2):
        engine.backward(engine(torch.ones(2, WIDTH, device=device_of(model))).square().mean())
        engine.step()
    return engine


def shards(engine: zero.Engine) -> Iterator[Tensor]:
    for unit in engine.units:
        for group in unit.groups:
            yield from group.parameters


CONFIGS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"precision": "bf16", "clip_norm": 1.0},
    "fp16": {"precision": "bf16", "loss_scale": "dynamic"},
    "stage 2": {"stage": 2, "gradient_accumulation_steps": 2},
    "on the host": {"offload": zero.Offload(optimizer="host", params="host")},
    "streamed": {"offload": zero.Offload(optimizer="host", step="device")},
    "measured": {"offload": "auto"},
    "compiled": {"compile": zero.Compile(inner="aot_eager")},
}


def living_parts() -> set[int]:
    """What an engine consists of: these hold its tensors, or what holds them. Graphs hold none, and the
    compiler makes them with cycles."""
    kinds = (nn.Module, torch.optim.Optimizer, FlatGroup, ShardedOptimizer, zero.Engine)
    found = (one for one in gc.get_objects() if issubclass(type(one), kinds))
    return {id(part) for part in found if not isinstance(part, fx.GraphModule)}


@collected()
def freed_body(context: Context) -> dict[str, list[int]]:
    """Parts and parameters that are left of each engine."""
    found = {}
    for name, settings in CONFIGS.items():
        with warnings.catch_warnings(), no_collection():
            warnings.simplefilter("ignore")
            before = living_parts()
            engine = trained(zero.Config(timeout=20, **settings), sgd if name == "stage 2" else adamw)
            engine.state_dict()
            parameters = weakref.WeakSet(shards(engine))
            assert len(parameters) == 8
            del engine
            found[name] = [len(living_parts() - before), len(parameters)]
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_reference_counts_free_everything(cluster: Clusters, size: int) -> None:
    for found in cluster(size).run(freed_body, limit=120):
        assert found == {name: [0, 0] for name in CONFIGS}


def left_over_body(context: Context) -> tuple[bool, float, str]:
    """The model after its engine has gone; then the optimizer, after the model has."""
    with no_collection():
        engine = trained(zero.Config(timeout=20), adamw)
        model, optimizer, alive = engine.module, engine.optimizer, weakref.ref(engine)
        del engine
        x = torch.ones(2, WIDTH, device=device_of(model))
        with torch.no_grad():
            value = model(x).sum().item()
        gone = alive() is None
        del model
        with pytest.raises(zero.UsageError) as caught:
            optimizer.step()
        return gone, value, str(caught.value)


def test_the_model_goes_on_gathering_without_the_engine(cluster: Clusters) -> None:
    found = cluster(2).run(left_over_body)
    assert all(gone and "keep what zero.initialize returns" in said for gone, _, said in found)
    assert found[0][1] == found[1][1] != 0


def fail(engine: zero.Engine, folder: str) -> None:
    """Make calls that raise, some of them with an error of their own as its cause."""
    calls: list[Callable[[], Any]] = [
        lambda: engine.load_checkpoint(folder),
        lambda: engine.save_checkpoint(folder, {"an": object()}),
        lambda: engine.load_state_dict({}),
        lambda: engine.state_dict(include="none"),
        engine.step,
        engine.optimizer.step,
    ]
    for call in calls:
        with suppress(zero.ZeroError):
            call()
            raise AssertionError


def failed_body(context: Context, folder: str) -> bool:
    with no_collection():
        engine = trained(zero.Config(timeout=20, gradient_accumulation_steps=1), adamw)
        alive = weakref.ref(engine)
        fail(engine, folder)
        del engine
        return alive() is None


def test_errors_that_are_over_keep_nothing(cluster: Clusters, tmp_path: Path) -> None:
    assert all(cluster(2).run(failed_body, folder=str(tmp_path / "none")))
