"""offload_states and reload_states: the device's memory for others, and every bit back."""

from __future__ import annotations

import gc
import itertools
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.simulated import faults_of
from tests.zero.conftest import Abilities
from tests.zero.helpers.models import fresh, language_loss
from tests.zero.helpers.optimizers import adagrad
from tests.zero.helpers.training import Run, adamw, collect_all, collected, same_bits

CASES: dict[str, dict[str, Any]] = {
    "stage 3": {"precision": "bf16"},
    "stage 3 fp32": {},
    "stage 2": {"stage": 2, "precision": "bf16"},
    "stage 0": {"stage": 0},
    "host already, one master and shard": {"offload": zero.Offload(optimizer="host", params="host")},
    "host already": {"offload": zero.Offload(optimizer="host"), "precision": "bf16"},
    "visiting": {"offload": zero.Offload(optimizer="host", step="device"), "precision": "bf16"},
    "visiting, the master is the shard": {"offload": zero.Offload(optimizer="host", step="device")},
}


def train(context: Context, away: bool, path: str, optimizer: Any = adamw, **settings: Any) -> Run:
    engine = zero.initialize(model := fresh(), optimizer(model), zero.Config(timeout=20, **settings))
    run = Run()
    for step in range(4):
        loss = language_loss(model, step, context.rank)
        engine.backward(loss)
        engine.step()
        run.losses.append(loss.item())
        del loss
        if away and step == 1:
            _go_away_and_return(context, engine, path)
    run.state = engine.state_dict(master=True)
    return run


def _go_away_and_return(context: Context, engine: zero.Engine, path: str) -> None:
    before = engine.state_dict()
    engine.offload_states()
    gc.collect()
    if context.accelerator.capabilities.counts_every_byte:
        held = context.accelerator.memory.stats().allocated
        assert held < 1024, held  # module buffers and scalars
    with pytest.raises(zero.UsageError, match="reload_states"):
        language_loss(engine.module, 0, context.rank)
    there = engine.state_dict()  # whole values are made from what is on the host
    assert all(torch.equal(value, there[name]) for name, value in before.items())
    engine.save_checkpoint(Path(path, "away"))
    engine.reload_states()
    engine.reload_states()  # nothing is away any more


@collected()
def away_body(context: Context, path: str) -> dict[str, bool]:
    found = {}
    for name, settings in CASES.items():
        plain = train(context, False, path, **settings)
        gc.collect()
        found[name] = same_bits(train(context, True, path, **settings), plain)
        gc.collect()
    plain = train(context, False, path, adagrad)
    gc.collect()
    found["any optimizer"] = same_bits(train(context, True, path, adagrad), plain)
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_states_go_and_come_back_exactly(cluster: Clusters, tmp_path: Path, size: int) -> None:
    for found in cluster(size).run(away_body, path=str(tmp_path), limit=120):
        assert all(found.values()), found


def evaluated_body(context: Context, path: str) -> dict[str, bool]:
    """State goes, comes back and is loaded in a function under inference_mode: training goes on with it."""
    found = {}
    for stage, precision, optimizer in ((3, "bf16", adamw), (1, "fp32", adagrad), (3, "fp32", adamw)):
        runs = []
        for mode in (torch.no_grad, torch.inference_mode):
            config = zero.Config(stage=stage, precision=precision, timeout=20)  # type: ignore[arg-type]
            engine = zero.initialize(model := fresh(), optimizer(model), config)
            for step in range(2):
                engine.backward(language_loss(model, step, context.rank))
                engine.step()
                with mode():
                    engine.offload_states()
                    engine.reload_states()
            with mode():
                engine.save_checkpoint(Path(path, "evaluated"))
                engine.load_checkpoint(Path(path, "evaluated"))
            engine.backward(language_loss(model, 2, context.rank))
            engine.step()
            runs.append(Run(state=engine.state_dict(master=True)))
        found[f"stage {stage} {precision}"] = same_bits(*runs)
    return found


def test_what_an_evaluation_has_moved_is_trained(cluster: Clusters, tmp_path: Path) -> None:
    for found in cluster(2).run(evaluated_body, path=str(tmp_path), limit=60):
        assert all(found.values()), found


def between_body(context: Context) -> str:
    engine = zero.initialize(model := fresh(), adamw(model), zero.Config(timeout=20))
    engine.backward(language_loss(model, 0, context.rank))
    with pytest.raises(zero.UsageError) as raised:
        engine.offload_states()
    engine.step()
    return str(raised.value)


def test_gradients_are_not_left_behind(cluster: Clusters) -> None:
    for message in cluster(1).run(between_body):
        assert "between backward() and step()" in message


STAGES = (0, 1, 2, 3)


def half_way_body(context: Context) -> dict[str, bool]:
    """One rank's host has no more page-locked memory, first of all, and in the middle of it."""
    found = {}
    memory = context.accelerator.memory
    for stage, nth in itertools.product(STAGES, (1, 4)):
        engine, runs = _trained(stage), []
        runs.append(Run(state=engine.state_dict(master=True)))
        grants = iter([memory.empty_host] * (nth - 1))

        def no_more(*args: Any, left: Any = grants) -> Tensor:
            grant = next(left, None)
            if grant is None:
                raise RuntimeError("no page-locked memory")
            return grant(*args)

        if context.rank == 1:
            with patch.object(memory, "empty_host", no_more), pytest.raises(RuntimeError, match="no page"):
                engine.offload_states()
        else:
            engine.offload_states()
        with pytest.raises(zero.UsageError, match="reload_states"):
            language_loss(engine.module, 0, context.rank)
        engine.reload_states()
        runs.append(Run(state=engine.state_dict(master=True)))
        _step(engine, 1)
        found[f"stage {stage}, {nth}"] = same_bits(*runs)
    return found


@pytest.mark.usefixtures("apart")
def test_what_could_not_leave_comes_back(cluster: Clusters) -> None:
    for found in cluster(2).run(half_way_body, limit=60):
        assert all(found.values()), found


def no_room_body(context: Context) -> dict[str, tuple[str, bool]]:
    """One rank has no room to reload. By stage and allocation: what is said, and whether all is back then."""
    found = {}
    for stage, nth in itertools.product(STAGES, (1, 2, 6)):
        engine = _trained(stage)
        before = Run(state=engine.state_dict(master=True))
        engine.offload_states()
        fault = faults_of(context.accelerator).out_of_memory(nth) if context.rank == 1 else nullcontext()
        with fault, pytest.raises(zero.ZeroError) as raised:
            engine.reload_states()
        with pytest.raises(zero.UsageError, match="reload_states"):
            language_loss(engine.module, 0, context.rank)
        engine.reload_states()
        after = Run(state=engine.state_dict(master=True))
        _step(engine, 1)
        found[f"stage {stage}, {nth}"] = str(raised.value), same_bits(before, after)
    return found


@pytest.mark.usefixtures("simulated")
def test_no_room_to_reload_on_one_rank(cluster: Clusters) -> None:
    """All ranks hear of it, none waits for another, and all may try again."""
    first, second = cluster(2).run(no_room_body, limit=60)
    assert first.keys() == second.keys()
    for said, same in (*first.values(), *second.values()):
        assert same, said
    for said, _ in first.values():
        assert "failed on another rank" in said
    for said, _ in second.values():
        assert re.search(r"no room (to reload|for the optimizer state of) unit '.+'", said), said


@collected()
def loaded_body(context: Context, path: str) -> dict[str, tuple[bool, list[int]]]:
    """A checkpoint loaded while the state is away. By stage: whether training goes on from there, and bytes
    in use before, while loaded, and when all is back."""
    found = {}
    for stage, precision in itertools.product(STAGES, ("fp32", "bf16")):
        collect_all()
        engine = _trained(stage, precision)
        engine.save_checkpoint(Path(path, "loaded"))
        before = context.accelerator.memory.stats().allocated
        _step(engine, 1)
        expected = Run(state=engine.state_dict(master=True))
        engine.offload_states()
        engine.load_checkpoint(Path(path, "loaded"))
        gc.collect()
        away = context.accelerator.memory.stats().allocated
        engine.reload_states()
        gc.collect()
        back = context.accelerator.memory.stats().allocated
        _step(engine, 1)
        same = same_bits(expected, Run(state=engine.state_dict(master=True)))
        found[f"stage {stage} {precision}"] = same, [before, away, back]
        del engine
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_a_load_leaves_the_state_away(
    cluster: Clusters, abilities: Abilities, tmp_path: Path, size: int
) -> None:
    for found in cluster(size).run(loaded_body, path=str(tmp_path), limit=60):
        for case, (same, (before, away, back)) in found.items():
            assert same, case
            assert not abilities.exact or (away < before / 10 and back == before), (case, before, away, back)


def _trained(stage: Any, precision: Any = "bf16") -> zero.Engine:
    config = zero.Config(stage=stage, precision=precision, timeout=20)
    engine = zero.initialize(model := fresh(), adamw(model), config)
    _step(engine, 0)
    return engine


def _step(engine: zero.Engine, step: int) -> None:
    engine.backward(language_loss(engine.module, step, engine.rank))
    engine.step()


def refused_body(context: Context) -> dict[str, bool]:
    """Calls that need what is away are refused, change nothing, and do their work when it is back."""
    found = {}
    for stage in STAGES:
        runs = []
        for away in (False, True):
            engine = zero.initialize(model := fresh(), adamw(model), zero.Config(stage=stage, timeout=20))
            loss = language_loss(model, 0, context.rank)
            state = engine.state_dict()
            if away:
                _refuse_everything(engine, loss, state)
            engine.backward(loss)
            engine.step()
            with zero.gathered(model.blocks[0].up.weight, write_rank=0), torch.no_grad():
                model.blocks[0].up.weight.mul_(2)
            runs.append(Run(state=engine.state_dict(master=True)))
        found[f"stage {stage}"] = same_bits(*runs)
    return found


def _refuse_everything(engine: zero.Engine, loss: Tensor, state: dict[str, Any]) -> None:
    weight = engine.module.blocks[0].up.weight
    with (
        pytest.raises(zero.UsageError, match=r"offload_states\(\) was called inside"),
        zero.gathered(weight),
    ):
        engine.offload_states()
    engine.offload_states()
    calls = {
        "backward": lambda: engine.backward(loss),
        "load_state_dict": lambda: engine.load_state_dict(state),
        "load_pretrained": lambda: engine.load_pretrained("nowhere"),
        "gathered": lambda: zero.gathered(weight, write_rank=0).__enter__(),
    }
    for call in calls.values():
        with pytest.raises(zero.UsageError, match="reload_states"):
            call()
    assert engine.full_master("blocks.0.up.weight").shape == weight.shape
    engine.reload_states()


def test_what_needs_the_state_waits_for_it(cluster: Clusters) -> None:
    for found in cluster(2).run(refused_body, limit=60):
        assert all(found.values()), found
