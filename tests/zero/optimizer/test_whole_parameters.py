"""Optimizers that need more than single elements: whole parameters, each stepped by one rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.loops import train_on
from tests.zero.helpers.models import fresh, language_loss, tokens
from tests.zero.helpers.training import (
    Run,
    exchanges_of,
    relative_error,
    same_bits,
    state_error,
    train_reference,
    train_zero,
)
from tests.zero.helpers.whole_optimizers import (
    OPTIMIZERS,
    STEPS,
    Trust,
    trust,
)
from zero.optimizer.joint import JointOptimizer

BOUNDS = {
    "trust": 1e-5,
    "adafactor": 1e-4,
    "muon": 3e-2,
    "slices": 1e-4,
    "kernels": 1e-4,
}  # Muon orthogonalizes in bf16


class Each(JointOptimizer):
    """Steps one optimizer or several, without an engine."""

    def __init__(self, optimizers: Any) -> None:
        super().__init__(optimizers if isinstance(optimizers, list) else [optimizers])

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for optimizer in self.optimizers:
            optimizer.step()


def run_of(context: Context, name: str, steps: int = STEPS, **settings: Any) -> Run:
    config = zero.Config(timeout=20, **settings)
    return train_zero(context, fresh(), language_loss, config, OPTIMIZERS[name], steps)


def parity_body(context: Context, name: str, stages: Sequence[int]) -> dict[str, Any]:
    each = lambda model: Each(OPTIMIZERS[name](model))  # noqa: E731
    reference = train_reference(context, fresh(), language_loss, each, STEPS, clip=0.5)
    runs = {stage: run_of(context, name, stage=stage, clip_norm=0.5) for stage in stages}
    again = run_of(context, name, stage=3, clip_norm=0.5)
    return {
        "loss": max(relative_error(run.losses, reference.losses) for run in runs.values()),
        "state": max(state_error(run.state, reference.state) if run.state else 0.0 for run in runs.values()),
        "same": same_bits(runs.get(1, again), runs.get(2, again)) and same_bits(runs[3], again),
    }


OTHER_SIZES = [
    (1, "trust"),
    (1, "slices"),
    (3, "trust"),
    (3, "adafactor"),
    (3, "muon"),
    (4, "muon"),
    (4, "kernels"),
]


@pytest.mark.parametrize(
    ("size", "name", "stages"),
    [
        *(pytest.param(2, name, (0, 1, 2, 3), id=f"2-{name}") for name in OPTIMIZERS),
        *(
            pytest.param(size, name, (0, 3), id=f"{size}-{name}", marks=pytest.mark.host)
            for size, name in OTHER_SIZES
        ),
    ],
)
def test_it_equals_data_parallel(
    cluster: Clusters, device: str, size: int, name: str, stages: tuple[int, ...]
) -> None:
    chosen = stages if device == "cpu" or name == "muon" else (0, 3)
    for found in cluster(size).run(parity_body, name=name, stages=chosen, limit=120):
        assert found["loss"] < BOUNDS[name], found
        assert found["state"] < BOUNDS[name], found
        assert found["same"]


def settings_body(context: Context, path: str) -> dict[str, tuple[bool, float]]:
    """Compare every tier, and other settings that affect a step, with training on the device."""
    everything = zero.Offload(optimizer="host", params="disk", gradients="disk", path=path)
    cases: dict[str, dict[str, Any]] = {
        "host": {"offload": zero.Offload(optimizer="host")},
        "half": {"offload": zero.Offload(optimizer="host", fraction=0.5)},
        "parameters too": {"offload": zero.Offload(optimizer="host", params="host")},
        "gradients on disk": {"offload": everything},
        "stage 2": {"stage": 2, "offload": zero.Offload(optimizer="host")},
        "auto": {"offload": "auto"},
        "persistent": {"persistent_below": 100},
        "units": {"units": ("Linear",)},
    }
    found = {}
    for name, precision in (("trust", "fp32"), ("muon", "bf16")):
        plain = run_of(context, name, precision=precision, clip_norm=0.5)
        for case, settings in cases.items():
            run = run_of(context, name, precision=precision, clip_norm=0.5, **settings)
            worst = max(
                relative_error(run.losses, plain.losses), state_error(run.state, plain.state or run.state)
            )
            found[f"{name}, {precision}, {case}"] = same_bits(run, plain), worst
    return found


def test_tiers_and_settings_change_no_value(cluster: Clusters, tmp_path: Path, device: str) -> None:
    for found in cluster(2).run(settings_body, path=str(tmp_path), limit=120):
        for case, (same, error) in found.items():
            other_sums = case.endswith(("units", "stage 2", "persistent"))  # of the clipping norm
            assert same or device != "cpu" or other_sums, case
            assert error < 5e-2, (case, error)


def accumulation_body(context: Context, stages: Sequence[int]) -> dict[str, bool]:
    """Micro-batches, and a loss scale that overflows first, for every optimizer."""
    result = {}
    for name in OPTIMIZERS:
        steps = {"gradient_accumulation_steps": 2}
        runs = [run_of(context, name, stage=stage, **steps) for stage in stages]
        result[f"{name}, sums"] = all(relative_error(r.losses, runs[0].losses) < 3e-2 for r in runs)
        model = fresh()
        scaled = zero.Config(precision="fp16", loss_scale="dynamic", timeout=20)
        engine = zero.initialize(model, OPTIMIZERS[name](model), scaled)
        before = engine.full_master("blocks.0.up.weight")
        train_on(engine, language_loss(model, 0, context.rank) * 1e9)
        after = engine.full_master("blocks.0.up.weight")
        result[f"{name}, overflow"] = torch.equal(before, after)
        used = engine.full_master("gain")
        loss = model(tokens(0, context.rank, model))["loss"]
        train_on(engine, loss / 1e3)
        result[f"{name}, stepped"] = not torch.equal(used, engine.full_master("gain"))
    return result


def test_accumulation_and_overflow(cluster: Clusters, device: str) -> None:
    stages = (0, 2, 3) if device == "cpu" else (0, 3)
    for found in cluster(2).run(accumulation_body, stages=stages, limit=120):
        assert all(found.values()), found


class Forked(nn.Module):
    """Uses one of its two layers, depending on the step."""

    def __init__(self) -> None:
        super().__init__()
        self.even, self.odd = nn.Linear(9, 9), nn.Linear(9, 9)

    def forward(self, x: Tensor, step: int) -> Tensor:
        return (self.odd if step % 2 else self.even)(x)


def unused_body(context: Context) -> bool:
    torch.manual_seed(0)
    model = Forked()
    engine = zero.initialize(model, trust(model), zero.Config(timeout=20))
    x = torch.ones(3, 9, device=context.accelerator.device)
    still = True
    for step in range(4):
        name = "even.weight" if step % 2 else "odd.weight"
        before, state = engine.full_master(name), engine.full_optimizer_state(name)
        train_on(engine, engine(x, step).square().mean())
        still = still and torch.equal(before, engine.full_master(name))
        again = engine.full_optimizer_state(name)
        still = still and all(torch.equal(value, again[key]) for key, value in state.items())
    return still and bool(engine.full_optimizer_state("odd.weight")["momentum"].abs().sum())


def test_what_no_rank_used_is_not_stepped(cluster: Clusters) -> None:
    assert all(cluster(2).run(unused_body))


def state_of(engine: zero.Engine) -> dict[str, Any]:
    """Masters and optimizer state of all parameters, whole, on the host."""
    names = [name for name, p in engine.module.named_parameters() if p.requires_grad and p.numel()]
    state = {name: {k: v.cpu() for k, v in engine.full_optimizer_state(name).items()} for name in names}
    return {"state": state, "masters": {name: engine.full_master(name).cpu() for name in names}}


def saving_body(context: Context, path: str, name: str) -> dict[str, Any]:
    model = fresh()
    engine = zero.initialize(model, OPTIMIZERS[name](model), zero.Config(precision="bf16", timeout=20))
    for step in range(3):
        train_on(engine, language_loss(model, step, context.rank))
    engine.save_checkpoint(path)
    return state_of(engine)


def loading_body(context: Context, path: str, name: str, stage: int) -> dict[str, Any]:
    torch.manual_seed(1)
    model = fresh()
    config = zero.Config(stage=stage, precision="bf16", timeout=20)
    engine = zero.initialize(model, OPTIMIZERS[name](model), config)
    engine.load_checkpoint(path)
    engine.offload_states()
    engine.reload_states()
    loaded = state_of(engine)
    train_on(engine, language_loss(model, 3, context.rank))
    return loaded


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_resumes_at_any_world_size(cluster: Clusters, tmp_path: Path, device: str, name: str) -> None:
    path = str(tmp_path / "step-3")
    saved = cluster(3).run(saving_body, path=path, name=name)[0]
    assert all(set(state) for state in saved["state"].values())
    for size, stage in ((1, 3), (2, 3), (2, 0), (4, 1)) if device == "cpu" else ((1, 3), (2, 0)):
        for loaded in cluster(size).run(loading_body, path=path, name=name, stage=stage):
            for key, master in saved["masters"].items():
                assert torch.equal(master, loaded["masters"][key]), key
                assert saved["state"][key].keys() == loaded["state"][key].keys()
                for kind, value in saved["state"][key].items():
                    assert torch.equal(value, loaded["state"][key][kind]), (key, kind)


def slices_body(context: Context) -> tuple[bool, int]:
    """A user-defined optimizer that works element-wise steps slices on request, with the same values."""

    class Plain(torch.optim.Adamax):
        pass

    def plain(model: nn.Module) -> Optimizer:
        return Plain(model.parameters(), lr=1e-2)

    runs = [
        train_zero(context, fresh(), language_loss, zero.Config(timeout=20, **settings), plain, STEPS)
        for settings in ({}, {"whole_parameters": False}, {"whole_parameters": True})
    ]
    model = fresh()
    engine = zero.initialize(model, plain(model), zero.Config(timeout=20, whole_parameters=False))
    train_on(engine, language_loss(model, 0, context.rank))
    return same_bits(runs[0], runs[1]) and same_bits(runs[0], runs[2]), engine.traffic.calls["all_to_all"]


def test_slices_on_request(cluster: Clusters) -> None:
    assert cluster(2).run(slices_body) == [(True, 0)] * 2


def strides_body(context: Context, path: str) -> bool:
    """State that a step makes with other strides than the parameter's is saved with the parameter's."""

    class Plain(Trust):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()
            for state in self.state.values():
                state["momentum"] = state["momentum"].contiguous()

    def built() -> zero.Engine:
        torch.manual_seed(0)
        model = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        return zero.initialize(model, Plain(model.parameters()), zero.Config(timeout=10))

    def stepped(engine: zero.Engine) -> Tensor:
        x = torch.arange(48.0, device=context.accelerator.device).view(1, 3, 4, 4)
        loss = engine(x).square().mean()
        train_on(engine, loss)
        return loss.detach()

    first, second = built(), built()
    stepped(first)
    first.save_checkpoint(path)
    second.load_checkpoint(path)
    return all(torch.equal(stepped(first), stepped(second)) for _ in range(2))


def test_state_of_other_strides_resumes(cluster: Clusters, tmp_path: Path) -> None:
    assert all(cluster(2).run(strides_body, path=str(tmp_path / "step-1")))


def meetings_body(context: Context, layers: int) -> int:
    """How often the ranks meet over host memory in a step of so many groups."""
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(layers)))
    config = zero.Config(units=(nn.Linear,), timeout=20)
    engine = zero.initialize(model, torch.optim.Muon(model.parameters()), config)
    engine.backward(engine(torch.ones(2, 8, device=context.accelerator.device)).square().sum())
    counted = exchanges_of(engine)
    engine.step()
    return len(counted)


def test_ranks_meet_as_often_for_many_groups_as_for_few(cluster: Clusters) -> None:
    few, many = (cluster(2).run(meetings_body, layers=layers) for layers in (2, 7))
    assert few == many
    assert max(few) <= 4
