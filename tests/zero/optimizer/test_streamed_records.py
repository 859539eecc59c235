"""State that waits on the host and is stepped on the device, with the bits of state that is always there."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.simulated import faults_of
from tests.zero.helpers.courses import Course, course, same
from tests.zero.helpers.late_stream import run_late
from tests.zero.helpers.models import fresh, language_loss
from tests.zero.helpers.optimizers import adagrad, lion, momentum, plain_sgd
from tests.zero.helpers.training import adamw, collected

VISITING: dict[str, Any] = {"optimizer": "host", "step": "device"}
WIDTH, LAYERS = 64, 8


def changed_between(engine: zero.Engine, step: int) -> None:
    """A user's changes between backward and step, which a copy made before does not have."""
    weight = engine.module.head.weight
    with zero.gathered(weight, write_rank=0), torch.no_grad():
        weight.mul_(1.5)
    with torch.no_grad():
        for state in engine.optimizer.state.values():
            state["exp_avg"].add_(0.25)


def parked(engine: zero.Engine, step: int) -> None:
    engine.offload_states()
    engine.reload_states()


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fp32": ({}, {}),
    "bf16": ({}, {"precision": "bf16", "clip_norm": 0.5}),
    "fp16": ({}, {"precision": "fp16", "clip_norm": 1.0}),
    "stage 1": ({}, {"stage": 1, "precision": "bf16"}),
    "stage 2": ({}, {"stage": 2, "gradient_accumulation_steps": 2}),
    "stage 0": ({}, {"stage": 0, "precision": "bf16"}),
    "accumulation": ({}, {"gradient_accumulation_steps": 3, "precision": "bf16", "steps": 6}),
    "local": ({}, {"gradient_accumulation_steps": 2, "accumulate": "local"}),
    "persistent": ({}, {"persistent_below": 100, "precision": "bf16"}),
    "half": ({"fraction": 0.5}, {"precision": "bf16"}),
    "budget": ({"host_budget": 8000}, {"precision": "bf16"}),
    "small records": ({"sub_group_size": 64}, {"precision": "bf16"}),
    "a part in small records": ({"sub_group_size": 64, "fraction": 0.37}, {}),
    "gradients": ({"gradients": "host"}, {"precision": "bf16"}),
    "params": ({"params": "host"}, {"precision": "bf16"}),
    "params fp32": ({"params": "host"}, {}),
    "parked": ({}, {"precision": "bf16", "after": parked}),
    "parked fp32": ({}, {"after": parked}),
    "parked params": ({"params": "host"}, {"after": parked}),
    "changes": ({}, {"precision": "bf16", "between": changed_between}),
    "changes fp32": ({"params": "host"}, {"between": changed_between}),
    "lion": ({}, {"optimizer": lion, "precision": "bf16"}),
    "momentum": ({}, {"optimizer": momentum}),
    "sgd": ({}, {"optimizer": plain_sgd}),
    "sgd bf16": ({}, {"optimizer": plain_sgd, "precision": "bf16"}),
}


ALONE = ("fp32", "bf16", "half", "small records", "params", "parked", "changes fp32")
"""For one rank, which gathers and sums nothing."""
LATE = (
    *("fp32", "fp16", "stage 1", "stage 2", "half", "small records", "gradients", "params", "params fp32"),
    *("parked", "changes fp32", "sgd"),
)
"""For a late stream: where copies go another way, or something else waits for them."""


@cache
def expected(context: Context, name: str) -> Course:
    """With state on the device, by a name of CASES that has the settings; the same in every test."""
    return course(context, offload={}, **CASES[name][1])


def parity_body(context: Context, names: Sequence[str]) -> list[str]:
    """Which cases differ."""
    found, first = [], dict[str, str]()
    for name, (_, settings) in CASES.items():
        first.setdefault(repr(settings), name)
    for name in names:
        tiers, settings = CASES[name]
        run = course(context, offload={**VISITING, **tiers}, **settings)
        found += [] if same(run, expected(context, first[repr(settings)])) else [name]
    return found


@pytest.mark.parametrize(("size", "names"), [(1, ALONE), (2, tuple(CASES))], ids=["1", "2"])
def test_bitwise_equal_to_state_on_the_device(cluster: Clusters, size: int, names: tuple[str, ...]) -> None:
    assert cluster(size).run(parity_body, names=names, limit=180) == [[]] * size


def disk_body(context: Context, path: str) -> bool:
    tiers = {**VISITING, "params": "disk", "gradients": "disk", "path": path}
    visiting = course(context, offload=tiers, precision="bf16")
    return same(visiting, expected(context, "half"))


def test_beside_parameters_and_gradients_on_disk(cluster: Clusters, tmp_path: Path) -> None:
    assert all(cluster(2).run(disk_body, path=str(tmp_path), limit=120))


def build(offload: zero.Offload | None, layers: int = LAYERS, **settings: Any) -> zero.Engine:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    config = zero.Config(offload=offload, timeout=20, units=("Linear",), **settings)
    return zero.initialize(model, adamw(model), config)


def backward(engine: zero.Engine, step: int) -> float:
    generator = torch.Generator().manual_seed(10 * step + engine.rank)
    x = torch.randn(4, WIDTH, generator=generator).to(engine.accelerator.device)
    loss = engine(x).float().square().mean()
    engine.backward(loss)
    return loss.item()


def step_body(context: Context) -> dict[str, Any]:
    """What is there between steps, and what a step takes beside it."""
    memory, found = context.accelerator.memory, {}
    for precision in ("bf16", "fp32"):
        for name, offload in {"stays": None, "visits": zero.Offload(**VISITING)}.items():
            gc.collect()
            start = memory.stats().allocated
            engine = build(offload, precision=precision)
            backward(engine, 0)
            engine.step()
            rest = memory.stats().allocated - start
            backward(engine, 1)
            before = memory.stats().allocated
            memory.reset_peak()
            engine.step()
            numel = engine.units[0].groups[0].layout.shard_numel
            found[f"{precision} {name}"] = {"rest": rest, "step": memory.stats().peak - before}
            found["record"] = 4 * numel
            found["after"] = memory.stats().allocated - start - rest
            del engine
    return found


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.usefixtures("exact")
def test_a_step_takes_three_records(cluster: Clusters, size: int) -> None:
    """Masters and moments; in fp32 the shards are the masters, and stay."""
    for found in cluster(size).run(step_body):
        for precision, values in (("bf16", 3), ("fp32", 2)):
            record = values * found["record"]
            stays, visits = found[f"{precision} stays"], found[f"{precision} visits"]
            assert stays["rest"] - visits["rest"] == LAYERS * record
            assert visits["step"] - stays["step"] == 3 * record
        assert found["after"] == 0


def checkpoint_body(context: Context, path: str) -> dict[str, bool]:
    """Saved from one tier, in the background too, and loaded into another."""
    found = {}
    for name, first, second, later in (
        ("visiting", VISITING, VISITING, False),
        ("to the device", VISITING, {}, False),
        ("from the device", {}, VISITING, True),
        ("in the background", VISITING, VISITING, True),
    ):
        engines = [build(zero.Offload(**tiers), precision="bf16") for tiers in (first, second, {})]
        for step in range(2):
            for engine in engines[::2]:
                backward(engine, step)
                engine.step()
        engines[0].save_checkpoint(Path(path, name), async_=later)
        backward(engines[0], 9)
        engines[0].step()  # a save in the background has what was there before
        engines[0].wait_for_checkpoint()
        engines[1].load_checkpoint(Path(path, name))
        for engine in engines[1:]:
            backward(engine, 2)
            engine.step()
        names = [n for n, _ in engines[1].module.named_parameters()]
        found[name] = all(
            torch.equal(value, engines[2].full_optimizer_state(n)[key])
            for n in names
            for key, value in engines[1].full_optimizer_state(n).items()
        ) and all(torch.equal(engines[1].full_master(n), engines[2].full_master(n)) for n in names)
    return found


def test_checkpoints_from_and_to_every_tier(cluster: Clusters, tmp_path: Path) -> None:
    for found in cluster(2).run(checkpoint_body, path=str(tmp_path), limit=120):
        assert found == dict.fromkeys(found, True)


def shown_body(context: Context) -> dict[str, Any]:
    """What a user sees right after a step, without an engine's help."""
    engine = build(zero.Offload(**VISITING), precision="bf16")
    other = build(None, precision="bf16")
    for each in (engine, other):
        backward(each, 0)
        each.step()
    mine, theirs = ([*each.optimizer.state.values()] for each in (engine, other))
    device = context.accelerator.device
    pieces = [p for group in engine.optimizer.param_groups for p in group["params"]]
    return {
        "same": all(
            torch.equal(v.cpu(), t[k].cpu()) for m, t in zip(mine, theirs, strict=True) for k, v in m.items()
        ),
        "on host": all(p.device.type == "cpu" for p in pieces),
        "locked": all(p.is_pinned() for p in pieces) or device.type == "cpu",
    }


def test_after_a_step_all_is_on_the_host(cluster: Clusters) -> None:
    for found in cluster(2).run(shown_body):
        assert found == {"same": True, "on host": True, "locked": True}


@dataclass
class Attempt:
    """A step in which an allocation failed. told: the error; "" where the step could do without."""

    loss: float = 0.0
    told: str = ""
    held: int = 0


def attempt(nth: int) -> Attempt:
    gc.collect()
    engine = build(zero.Offload(**VISITING), layers=3, precision="bf16")
    backward(engine, 0)
    found = Attempt()
    try:
        with faults_of(engine.accelerator).out_of_memory(nth):
            engine.step()
    except zero.OutOfMemoryError as error:
        found.told = str(error)
    else:
        found.loss = backward(engine, 1)
    found.held = engine._boundary.optimizer.record_streamer.device_bytes()
    return found


@collected()
def memory_body(context: Context) -> tuple[Attempt, list[Attempt]]:
    return attempt(1000), [attempt(nth) for nth in range(1, 28)]


@pytest.mark.usefixtures("simulated")
def test_no_room_to_come_ahead(cluster: Clusters) -> None:
    """Who finds no room comes on its turn, when others have gone; else the error names the unit."""
    for plain, attempts in cluster(1).run(memory_body, limit=120):
        survived = [found for found in attempts if not found.told]
        assert len(survived) >= 6  # each of three values of the second and the third record
        for found in attempts:
            assert found.held == 0
            assert "unit" in found.told or found.loss == plain.loss


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, "set optimizer='host', or keep step='host'"),
        ({"optimizer": "disk", "path": "/"}, "set optimizer='host', or keep step='host'"),
    ],
)
def test_contradictions_are_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(zero.ConfigError, match=told):
        zero.Offload(**settings, step="device")


def optimizer_body(context: Context) -> str:
    model = fresh()
    with pytest.raises(zero.ConfigError) as caught:
        zero.initialize(model, adagrad(model), zero.Config(offload=zero.Offload(**VISITING)))
    language_loss(model, 0, 0)  # nothing has changed
    return str(caught.value)


def test_other_optimizers_are_refused(cluster: Clusters) -> None:
    for message in cluster(1).run(optimizer_body):
        assert "Adagrad" in message
        assert "step='host'" in message


@pytest.mark.usefixtures("simulated")
def test_state_that_visits_on_a_late_stream(cluster: Clusters) -> None:
    assert run_late(cluster, 2, parity_body, names=LATE) == [[]] * 2
