"""Models that change after zero.initialize: frozen parameters are left alone, new ones are refused."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.loops import train_on
from tests.zero.helpers.models import LanguageModel, fresh, language_loss
from tests.zero.helpers.training import adamw, relative_error

FROZEN = {0: range(2, 5), 2: range(0, 3)}
"""The steps in which blocks are frozen."""


def thaw_or_freeze(model: LanguageModel, step: int) -> None:
    for index, steps in FROZEN.items():
        model.blocks[index].requires_grad_(step not in steps)


def plain_losses(steps: int) -> list[float]:
    """Losses of one rank, unsharded. All ranks have the same batches here."""
    model = fresh()
    optimizer, losses = adamw(model), []
    for step in range(steps):
        thaw_or_freeze(model, step)
        loss = language_loss(model, step, 0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def freezing_body(context: Context, config: dict[str, Any]) -> float:
    model = fresh()
    engine = zero.initialize(model, adamw(model), zero.Config(timeout=20, **config))
    losses = []
    for step in range(7):
        thaw_or_freeze(model, step)
        before = {i: engine.full_master(f"blocks.{i}.up.weight") for i in FROZEN}
        loss = language_loss(model, step, 0)
        train_on(engine, loss)
        losses.append(loss.item())
        for index, value in before.items():  # neither stepped nor decayed
            after = engine.full_master(f"blocks.{index}.up.weight")
            assert torch.equal(value, after) == (step in FROZEN[index])
    return relative_error(losses, plain_losses(7))


COMPILED = {"compile": zero.Compile(inner="aot_eager")}


@pytest.mark.parametrize(
    "config",
    [{"stage": 0}, {"stage": 2}, {"stage": 3}, pytest.param(COMPILED, marks=pytest.mark.host)],
    ids=["0", "2", "3", "compiled"],
)
def test_what_is_frozen_for_a_while_is_left_alone(cluster: Clusters, config: dict[str, Any]) -> None:
    assert max(cluster(2).run(freezing_body, config=config)) < 1e-5


def thawed_body(context: Context, stage: int) -> None:
    model = fresh()
    model.blocks[0].requires_grad_(False)
    engine = zero.initialize(model, adamw(model), zero.Config(timeout=20, stage=stage))

    def step() -> None:
        train_on(engine, language_loss(model, 0, context.rank))

    step()
    model.blocks[0].up.requires_grad_(True)
    with pytest.raises(
        zero.ModelError, match=r"frozen at zero.initialize are no longer frozen: blocks\.0\.up\.w"
    ):
        step()
    model.blocks[0].up.requires_grad_(False)
    step()
    assert engine.steps == 2


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_unfreezing_what_has_no_optimizer_state_is_refused(cluster: Clusters, stage: int) -> None:
    cluster(2).run(thawed_body, stage=stage)


def replaced_body(context: Context, stage: int, path: str) -> None:
    """A new layer replaces an old one, whose values must not be saved as the new one's."""
    model = fresh()
    engine = zero.initialize(model, adamw(model), zero.Config(timeout=20, stage=stage))
    old = model.blocks[1].up
    new = nn.Linear(old.in_features, old.out_features, device=engine.accelerator.device)
    model.blocks[1].up = new
    with pytest.raises(
        zero.ModelError, match=r"are not trained: blocks\.1\.up\.weight, blocks\.1\.up\.bias\. "
    ):
        engine.backward(language_loss(model, 0, context.rank))
    for use in (
        engine.state_dict,
        lambda: engine.load_state_dict({}),
        lambda: engine.save_checkpoint(path),
        lambda: engine.load_checkpoint(path),
        lambda: engine.load_pretrained(path),
    ):
        with pytest.raises(zero.ModelError, match="are not saved or loaded"):
            use()
    assert not Path(path).exists()
    model.blocks[1].up = old
    engine.backward(language_loss(model, 0, context.rank))
    assert engine.step()
    model.blocks[1].up = new.requires_grad_(False)  # changes nothing of training, but is not in what is saved
    engine.backward(language_loss(model, 0, context.rank))
    assert engine.step()
    with pytest.raises(zero.ModelError, match="are not saved or loaded"):
        engine.state_dict()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_new_parameters_are_refused(cluster: Clusters, stage: int, tmp_path: Path) -> None:
    cluster(2).run(replaced_body, stage=stage, path=str(tmp_path / "checkpoint"))


def renamed_body(context: Context, stage: int, path: str) -> None:
    """Layers that were swapped, and one in a wrapper: nothing is saved under another layer's name."""
    model = fresh()
    engine = zero.initialize(model, adamw(model), zero.Config(timeout=20, stage=stage))
    first, last = model.blocks[0], model.blocks[2]
    model.blocks[0], model.blocks[2] = last, first
    with pytest.raises(zero.ModelError, match=r"whose names have changed.*, blocks\.0\.up\.weight, "):
        engine.save_checkpoint(path)
    model.blocks[0], model.blocks[2] = nn.Sequential(first), last
    with pytest.raises(zero.ModelError, match=r"whose names have changed.*, blocks\.0\.0\.up\.weight, "):
        engine.state_dict()
    model.blocks[0] = first
    engine.save_checkpoint(path)


@pytest.mark.parametrize("stage", [0, 3])
def test_other_names_are_refused(cluster: Clusters, stage: int, tmp_path: Path) -> None:
    cluster(2).run(renamed_body, stage=stage, path=str(tmp_path / "checkpoint"))


REPLACED: dict[str, Any] = {
    "another dtype": lambda model: [setattr(p, "data", p.data.to(torch.float64)) for p in model.parameters()],
    "new data": lambda model: setattr(model.norm.weight, "data", model.norm.weight.data.clone()),
}


def moved_body(context: Context, how: str, stage: int) -> str:
    model = fresh()
    engine = zero.initialize(model, adamw(model), zero.Config(timeout=20, stage=stage))
    train_on(engine, language_loss(model, 0, context.rank))
    REPLACED[how](model)
    with pytest.raises(zero.ModelError) as caught:
        engine.backward(torch.zeros(1, requires_grad=True).sum())
    for use in (engine.state_dict, lambda: engine.load_state_dict({}), zero.gathered(model).__enter__):
        with pytest.raises(zero.ModelError, match="is no longer the engine's"):
            use()
    return str(caught.value)


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("how", REPLACED)
def test_memory_that_was_replaced_is_noticed(cluster: Clusters, how: str, stage: int) -> None:
    """Otherwise such parameters would never be trained again."""
    for message in cluster(2).run(moved_body, how=how, stage=stage):
        assert "is no longer the engine's" in message
        assert "norm.weight" in message


def changed_body(context: Context) -> dict[str, list[str]]:
    """A constraint on weights: in place, and where it should be applied."""
    found = {}
    for name, precision, gathered in (
        ("lost", "bf16", False),
        ("kept", "bf16", True),
        ("fp32", "fp32", False),
        ("away", "fp32", False),
    ):
        model = fresh()
        offload = zero.Offload(optimizer="host") if name == "away" else None
        config = zero.Config(timeout=20, stage=2, precision=precision, offload=offload)
        engine = zero.initialize(model, adamw(model), config)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for step in range(3):
                train_on(engine, language_loss(model, step, context.rank))
                inside = zero.gathered(model, write_rank=0) if gathered else nullcontext()
                with torch.no_grad(), inside:
                    model.norm.weight.clamp_(-0.5, 0.5)
        if name == "away":  # kept where the device is the host
            engine.backward(language_loss(model, 3, context.rank))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                engine.step()
            found["undone"] = ["undone"] * bool(model.norm.weight.max() > 0.6)
        found[name] = [str(w.message) for w in told if "changed in place" in str(w.message)]
    return found


def test_weights_that_the_next_step_overwrites_are_told(cluster: Clusters) -> None:
    for found in cluster(2).run(changed_body):
        assert len(found["lost"]) == 2
        assert (
            "and this step undoes the changes: norm.weight. The step computes the weights from separate "
            "masters" in found["lost"][0]
        )
        assert len(found["away"]) == 2 * len(found["undone"])
        assert found["kept"] == found["fp32"] == []
