"""Shards on the host that the device reads late: nothing writes to a shard before it has been read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.conftest import Abilities
from tests.zero.helpers.compiled_models import fresh as compiled_model
from tests.zero.helpers.loops import train_on
from tests.zero.helpers.models import fresh, language_loss
from tests.zero.helpers.optimizers import adagrad
from tests.zero.helpers.training import adamw, own_work_seen

HOST = {"optimizer": "host", "params": "host"}
Change = Callable[[zero.Engine, Path], object]


def stepped(engine: zero.Engine, path: Path) -> object:
    return engine.step()


def loaded(engine: zero.Engine, path: Path) -> object:
    return engine.load_checkpoint(path / "zeros")


def pretrained(engine: zero.Engine, path: Path) -> object:
    return engine.load_pretrained(path / "zeros.safetensors")


def state_loaded(engine: zero.Engine, path: Path) -> object:
    return engine.load_state_dict(torch.load(path / "zeros.pt"))


def written(engine: zero.Engine, path: Path) -> object:
    with zero.gathered(engine.module, write_rank=0), torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.zero_()
    return None


def away_and_back(engine: zero.Engine, path: Path) -> object:
    engine.zero_grad()
    engine.offload_states()
    engine.reload_states()
    return engine.load_checkpoint(path / "zeros")


CHANGES: dict[str, tuple[Change, dict[str, Any]]] = {
    "step": (stepped, {}),
    "step, bf16": (stepped, {"precision": "bf16"}),
    "step, optimizer on the device": (stepped, {"precision": "bf16", "offload": {"params": "host"}}),
    "step of any optimizer": (stepped, {"optimizer": adagrad}),
    "load_checkpoint": (loaded, {}),
    "load_checkpoint, bf16": (loaded, {"precision": "bf16"}),
    "load_pretrained": (pretrained, {"precision": "bf16"}),
    "load_state_dict": (state_loaded, {}),
    "gathered": (written, {"precision": "bf16"}),
    "there and back": (away_and_back, {"precision": "bf16"}),
}


def make(optimizer: Any = adamw, offload: dict[str, Any] | None = None, **settings: Any) -> zero.Engine:
    config = zero.Config(offload=zero.Offload(**(offload or HOST)), timeout=20, **settings)
    return zero.initialize(model := fresh(), optimizer(model), config)


def save_zeros(path: Path, precision: str) -> None:
    """A checkpoint, a state dict and weights, all of zeros."""
    from safetensors.torch import save_file

    engine = make(precision=precision)
    written(engine, path)
    engine.save_checkpoint(path / "zeros")
    state = engine.state_dict()
    torch.save(state, path / "zeros.pt")
    del state["head.weight"]  # tied
    save_file(state, path / "zeros.safetensors")


@torch.no_grad()
def evaluated(model: nn.Module) -> Tensor:
    """The model's result on the device, where it may not be computed yet."""
    return language_loss(model, 5, 0)


def late_body(context: Context, path: str, brought: bool) -> dict[str, tuple[bool, bool]]:
    """For each change: whether a forward before it uses the old values, and whether one after it still does.

    brought: move shards to the device ahead of their gathers, as compiled graphs do.
    """
    streams, found = context.accelerator.streams, {}
    for name, (change, settings) in CHANGES.items():
        engine = make(**settings)
        streams.synchronize()
        with streams.use(streams.new()):
            engine.backward(language_loss(engine.module, 0, context.rank))
            expected = evaluated(engine.module).item()
            for unit in engine.units if brought else ():
                unit.bring()
            late = evaluated(engine.module)
            change(engine, Path(path, settings.get("precision", "fp32")))
            after = evaluated(engine.module)
            found[name] = late.item() == expected, after.item() == expected
    return found


def save_body(context: Context, path: str) -> None:
    for precision in ("fp32", "bf16"):
        save_zeros(Path(path, precision), precision)


def test_a_forward_has_the_values_that_it_began_with(cluster: Clusters, tmp_path: Path, device: str) -> None:
    if device == "cpu":
        pytest.skip("where the device is the host, nothing is read late")
    for precision in ("fp32", "bf16"):
        (tmp_path / precision).mkdir()
    cluster(1).run(save_body, path=str(tmp_path))
    for brought in (False, True):
        for found in cluster(1).run(late_body, path=str(tmp_path), brought=brought, limit=60):
            assert found == dict.fromkeys(CHANGES, (True, False))


class CopiesFromHost(TorchDispatchMode):
    """Watches copies from the host. seen: for each, whether it was on the stream current at the start."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self.seen: list[bool] = []
        self._streams = context.accelerator.streams
        self._computes = self._streams.current()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[1].device.type == "cpu" != args[0].device.type:
            now: Any = self._streams.current()
            self.seen.append(now.native == self._computes.native)  # type: ignore[attr-defined]
        return func(*args, **(kwargs or {}))


def beside_body(context: Context) -> list[bool]:
    model = fresh()
    config = zero.Config(precision="bf16", offload=zero.Offload(params="host"), timeout=20)
    engine = zero.initialize(model, adamw(model), config)
    for step in range(2):  # in the second, units are gathered ahead
        with own_work_seen(), CopiesFromHost(context) as copies:
            loss = language_loss(model, step, context.rank)
        train_on(engine, loss)
    return copies.seen


def test_shards_come_beside_the_computation(cluster: Clusters, abilities: Abilities) -> None:
    """On one rank only: with several, a device without its own collectives also copies gathered values."""
    if not (abilities.apart and abilities.capabilities.streams):
        pytest.skip("needs a device with memory of its own and several streams")
    (found,) = cluster(1).run(beside_body)
    assert len(found) >= 4
    assert not any(found)


def ahead_body(context: Context) -> dict[str, tuple[bool, bool]]:
    """By unit, with shards on the host: whether the gathered values are there as soon as the gather has begun
    (which then was not beside the computation) and once it is over."""
    engine = zero.initialize(
        model := compiled_model(), adamw(model), zero.Config(offload=zero.Offload(params="host"), timeout=20)
    )
    found = {}
    for unit in engine.units:
        for group in unit.groups:
            fmt = unit.format_for(torch.bfloat16)
            if group.gather_format(fmt).dtype is not torch.bfloat16:
                continue
            unit.start_gather(fmt)
            values = group.buffer(group.gather_format(fmt)).data
            early = bool(values.isfinite().any())
            unit.gather(fmt)
            found[unit.name] = early, bool(values.isfinite().all())
            unit.release()
    return found


@pytest.mark.usefixtures("simulated")
def test_shards_on_the_host_are_cast_beside_the_computation(cluster: Clusters) -> None:
    (found,) = cluster(1).run(ahead_body)
    assert len(found) == 2
    assert set(found.values()) == {(False, True)}
