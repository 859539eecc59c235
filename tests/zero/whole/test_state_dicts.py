"""State dicts, whole: read, loaded, refused where they do not fit, and what a load does to gradients."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.loops import train_on
from tests.zero.helpers.models import (
    WIDTH,
    LanguageModel,
    features,
    fresh,
    language_loss,
)
from tests.zero.helpers.training import adamw


def plain_load_body(context: Context, stage: int) -> bool:
    """Whether the model's own load_state_dict(), which is refused otherwise, works inside `gathered`."""
    model, new = fresh(), {n: v + 1 for n, v in fresh().state_dict().items()}
    engine = zero.initialize(model, adamw(model), zero.Config(stage=stage, precision="bf16", timeout=10))
    for part, state in ((model, new), (model.blocks[0].up, fresh().blocks[0].up.state_dict())):
        with pytest.raises(zero.UsageError, match=r"engine\.load_state_dict"):
            part.load_state_dict(state)
    with zero.gathered(model, write_rank=0):
        if context.rank == 0:
            model.load_state_dict(new)
    masters = {n: engine.full_master(n) for n, _ in model.named_parameters()}
    return all(torch.equal(m.cpu(), new[n].bfloat16().float()) for n, m in masters.items())


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_models_own_load_state_dict_is_refused(cluster: Clusters, stage: int) -> None:
    """At 16 bits the next step would bring the old values back."""
    assert all(cluster(2).run(plain_load_body, stage=stage))


def round_trip_body(context: Context, precision: str) -> dict[str, Any]:
    config = zero.Config(precision=precision, timeout=10)
    model = fresh()
    engine = zero.initialize(model, adamw(model), config)
    for step in range(3):
        train_on(engine, language_loss(model, step, context.rank))
    state = engine.state_dict(master=True)
    narrow = engine.state_dict()
    other = LanguageModel()
    twin = zero.initialize(other, adamw(other), zero.Config(stage=1, precision=precision, timeout=10))
    twin.load_state_dict(state)
    again = twin.state_dict(master=True)
    names = [n for n, _ in fresh().named_parameters()]
    plain = LanguageModel()
    if context.rank == 0:
        plain.load_state_dict(narrow)
    return {
        "keys": list(state) == (list(fresh().state_dict()) if context.rank == 0 else []),
        "equal": all(torch.equal(state[n], again[n]) for n in state),
        "masters": all(
            torch.equal(engine.full_master(n), twin.full_master(n)) for n in names if n != "empty"
        ),
        "dtypes": sorted({str(v.dtype) for v in narrow.values()}),
    }


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_state_dict_round_trip(cluster: Clusters, precision: str) -> None:
    results = cluster(3).run(round_trip_body, precision=precision)
    for found in results:
        assert found["keys"]
        assert found["equal"]
        assert found["masters"]
    bf16 = ["torch.bfloat16", "torch.float32"]  # the buffer stays fp32
    assert results[0]["dtypes"] == (bf16 if precision == "bf16" else ["torch.float32"])


def misfit_body(context: Context) -> dict[str, str]:
    model = fresh()
    engine = zero.initialize(model, adamw(model), zero.Config(timeout=10))
    good = {k: torch.zeros_like(v) for k, v in fresh().state_dict().items()}
    before = engine.full_master("blocks.0.up.weight")
    cases = {
        "missing": {k: v for k, v in good.items() if k != "blocks.0.up.weight"},
        "unexpected": {**good, "blocks.9.up.weight": torch.zeros(1)},
        "shape": {**good, "gain": torch.zeros(3)},
        "numpy": {**good, "gain": good["gain"].numpy(), "shift": good["shift"].to("meta")},
        "path": "weights.pt",
        "none": None,
    }
    messages = {}
    for name, state in cases.items():
        try:
            engine.load_state_dict(state if context.rank == 0 else None)  # type: ignore[arg-type]
            messages[name] = "nothing raised"
        except zero.StateError as error:
            messages[name] = str(error)
    messages["unchanged"] = str(torch.equal(before, engine.full_master("blocks.0.up.weight")))
    partial = {"blocks.0.up.weight": torch.full((29, 12), 2.0)}
    engine.load_state_dict(partial if context.rank == 0 else None, strict=False)
    messages["partial"] = str(engine.full_master("blocks.0.up.weight").eq(2).all().item())
    try:
        engine.full_master("nonsense")
    except zero.StateError as error:
        messages["name"] = str(error)
    return messages


def test_state_dicts_that_do_not_fit(cluster: Clusters) -> None:
    for found in cluster(2).run(misfit_body):
        assert "missing: blocks.0.up.weight" in found["missing"]
        assert "unexpected: blocks.9.up.weight" in found["unexpected"]
        assert "with a different shape: gain: (3,) instead of ()" in found["shape"]
        assert "not a dense tensor with all its values: gain, shift" in found["numpy"]
        assert "rank 0 passed str instead of a mapping of names to tensors" in found["path"]
        assert "rank 0 passed NoneType instead" in found["none"]
        assert found["unchanged"] == "True"
        assert found["partial"] == "True"
        assert "no parameter 'nonsense'" in found["name"]


def pending_body(context: Context, stage: int) -> dict[str, Any]:
    """A load that is refused changes nothing, pending losses and gradients included."""
    model, found = fresh(), {}
    config = zero.Config(stage=stage, gradient_accumulation_steps=2, timeout=10)
    engine = zero.initialize(model, adamw(model), config)
    with pytest.raises(zero.StateError):
        engine.load_state_dict({})
    engine.backward(language_loss(model, 0, context.rank))
    loss = language_loss(model, 1, context.rank)
    with pytest.raises(zero.StateError):
        engine.load_state_dict({})
    engine.backward(loss)
    found["stepped"] = engine.step()
    twin = zero.initialize(model := fresh(), adamw(model), config)
    for step in range(2):
        twin.backward(language_loss(model, step, context.rank))
        twin.step()
    ours, theirs = engine.state_dict(), twin.state_dict()
    found["equal"] = all(torch.equal(ours[name], theirs[name]) for name in theirs)
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_a_load_that_is_refused_leaves_losses_and_gradients(cluster: Clusters, stage: int) -> None:
    for found in cluster(2).run(pending_body, stage=stage):
        assert found == {"stepped": True, "equal": True}


def dropped_body(context: Context, path: str, accumulation: int) -> list[str]:
    """Gradients of the old weights do not step the new ones, whichever way these came."""
    model, said = features_model(), []
    config = zero.Config(gradient_accumulation_steps=accumulation, timeout=10)
    engine = zero.initialize(model, adamw(model), config)
    whole = engine.state_dict()
    engine.save_checkpoint(Path(path, "saved"))
    if context.rank == 0:
        save_file(whole, Path(path, "model.safetensors"))
    engine.save_checkpoint(Path(path, "after"))  # every rank is here once the file is
    for load in (
        lambda: engine.load_state_dict(whole),
        lambda: engine.load_checkpoint(Path(path, "saved")),
        lambda: engine.load_pretrained(Path(path, "model.safetensors")),
    ):
        engine.backward(model(features(0, context.rank, model)).square().mean())
        load()
        with pytest.raises(zero.UsageError) as caught:
            engine.step()
        said.append(str(caught.value))
        now = engine.state_dict()
        assert all(torch.equal(now[name], value) for name, value in whole.items())
    for step in range(accumulation):
        engine.backward(model(features(step, context.rank, model)).square().mean())
        assert engine.step() == (step + 1 == accumulation)
    return said


def features_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_every_load_drops_the_gradients_so_far(cluster: Clusters, tmp_path: Path, accumulation: int) -> None:
    for said in cluster(2).run(dropped_body, path=str(tmp_path), accumulation=accumulation):
        assert len(said) == 3
        for message in said:
            assert message.startswith("step() without backward()")


class Stubborn(nn.Linear):
    """Takes its extra state the second time only."""

    refusals = 1

    def get_extra_state(self) -> Tensor:
        return torch.ones(1)

    def set_extra_state(self, state: Tensor) -> None:
        self.refusals -= 1
        if self.refusals >= 0:
            raise ArithmeticError


def broken_off_body(context: Context, path: str) -> tuple[str, str]:
    """A load that fails half-way: only a checkpoint puts it right."""
    torch.manual_seed(0)
    model = Stubborn(WIDTH, WIDTH)
    engine = zero.initialize(model, adamw(model), zero.Config(timeout=10))
    engine.save_checkpoint(path)
    state, said = engine.state_dict(), []
    with pytest.raises(ArithmeticError):
        engine.load_state_dict(state)
    for load in (lambda: engine.load_state_dict(state), lambda: engine.load_checkpoint(path)):
        load()
        try:
            engine.backward(model(features(0, context.rank, model)).square().mean())
            said.append("nothing raised")
        except zero.UsageError as error:
            said.append(str(error))
        for read in (engine.full_master, engine.full_gradient, engine.full_optimizer_state):
            with (
                nullcontext()
                if said[-1] == "nothing raised"
                else pytest.raises(zero.UsageError, match="was inte")
            ):
                read("weight")
    return said[0], said[1]


def test_a_load_that_fails_half_way_is_put_right_by_a_checkpoint(cluster: Clusters, tmp_path: Path) -> None:
    for first, second in cluster(2).run(broken_off_body, path=str(tmp_path / "c")):
        assert "was interrupted" in first
        assert second == "nothing raised"
