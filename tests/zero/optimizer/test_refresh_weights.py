"""On request, weights follow changes made through the optimizer's param_groups outside of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.loops import train_on
from tests.zero.helpers.models import fresh, language_loss
from tests.zero.helpers.training import adamw, train_averaging

STEPS = 3


class ScheduleFree(Optimizer):
    """Schedule-free gradient descent (Defazio et al., 2024, arXiv:2405.15682).

    The parameters in training lie between the iterates z and their average, which eval() shows.
    """

    def __init__(self, parameters: Any, lr: float, beta: float) -> None:
        super().__init__(parameters, {"lr": lr, "beta": beta, "k": 0})

    def _values(self) -> list[tuple[dict[str, Any], nn.Parameter, Tensor]]:
        found = [(group, p) for group in self.param_groups for p in group["params"]]
        for _, p in found:
            if "z" not in self.state[p]:
                self.state[p]["z"] = p.detach().clone()
        return [(group, p, self.state[p]["z"]) for group, p in found]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
        for group, p, z in self._values():
            if p.grad is not None:
                p.lerp_(z, 1 / group["k"])
                p.add_(p.grad, alpha=group["lr"] * (group["beta"] * (1 - 1 / group["k"]) - 1))
                z.sub_(p.grad, alpha=group["lr"])

    @torch.no_grad()
    def eval(self) -> None:
        for group, p, z in self._values():
            p.lerp_(z, 1 - 1 / group["beta"])

    @torch.no_grad()
    def train(self) -> None:
        for group, p, z in self._values():
            p.lerp_(z, 1 - group["beta"])


def schedule_free(model: nn.Module) -> ScheduleFree:
    return ScheduleFree(model.parameters(), lr=0.1, beta=0.9)


def steps(context: Context, engine: zero.Engine) -> None:
    for step in range(STEPS):
        train_on(engine, language_loss(engine.module, step, context.rank))


def reference(context: Context) -> dict[str, Tensor]:
    """Weights of unsharded training in eval mode."""
    kept: list[ScheduleFree] = []

    def make(model: nn.Module) -> Optimizer:
        kept.append(schedule_free(model))
        kept[0].models = model  # type: ignore[attr-defined]
        return kept[0]

    train_averaging(context, fresh(), language_loss, make, STEPS)
    kept[0].eval()
    return {name: value.detach().cpu() for name, value in kept[0].models.state_dict().items()}  # type: ignore[attr-defined]


def schedule_free_body(context: Context, stage: int, settings: dict[str, Any]) -> None:
    expected = reference(context)
    model = fresh()
    optimizer = schedule_free(model)
    config = zero.Config(stage=stage, whole_parameters=False, timeout=20, **settings)
    engine = zero.initialize(model, optimizer, config)
    steps(context, engine)
    trained = engine.state_dict()
    engine.offload_states()
    engine.reload_states()
    assert all(torch.equal(value, trained[name]) for name, value in engine.state_dict().items())
    optimizer.eval()
    engine.offload_states()
    engine.reload_states()
    told: list[Callable[[], object]] = [
        lambda: language_loss(model, 0, 0),
        engine.state_dict,
        lambda: engine.save_checkpoint("never"),
        lambda: engine.load_state_dict({}, strict=False),
        lambda: engine.load_checkpoint("never", strict=False),
        zero.gathered(model).__enter__,
    ]
    for call in told:
        with pytest.raises(zero.UsageError, match=r"refresh_weights"):
            call()
    engine.refresh_weights()
    shown, masters = engine.state_dict(), engine.state_dict(master=True)
    with torch.no_grad():
        language_loss(model, 0, context.rank)
    wide = settings.get("precision", "fp32") == "fp32"
    for name, value in shown.items():
        assert torch.equal(value, masters[name].to(value.dtype)), name
        if wide:
            torch.testing.assert_close(value, expected[name], atol=1e-5, rtol=1e-5)
    optimizer.train()
    engine.refresh_weights()
    for name, value in engine.state_dict().items():
        torch.testing.assert_close(
            value, trained[name], atol=1e-5 if wide else 1e-2, rtol=1e-5 if wide else 1e-2
        )
    assert not shown or any(not torch.equal(value, trained[name]) for name, value in shown.items())
    steps(context, engine)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 2])
def test_schedule_free_optimizers_show_their_average(cluster: Clusters, size: int, stage: int) -> None:
    for settings in ({}, {"precision": "bf16", "offload": zero.Offload(optimizer="host")}):
        cluster(size).run(schedule_free_body, stage=stage, settings=settings)


def clamp(optimizer: Optimizer, limit: float) -> None:
    with torch.no_grad():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.clamp_(-limit, limit)


def check_within(engine: zero.Engine, limit: float) -> None:
    trained, state = [n for n, p in engine.module.named_parameters() if p.requires_grad], engine.state_dict()
    for name in trained if state else ():
        bound = torch.tensor(limit).to(state[name].dtype)
        assert bool((state[name].abs() <= bound).all()), name


def clamped_body(context: Context, settings: dict[str, Any]) -> None:
    """Clamp after a step, in a hook and outside of one, parameters stepped by kernels and others."""
    visits = "offload" in settings and settings["offload"].step == "device"
    for make in (adamw,) if visits else (adamw, rmsprop):
        model = fresh()
        optimizer = make(model)
        engine = zero.initialize(model, optimizer, zero.Config(timeout=20, **settings))
        hook = optimizer.register_step_post_hook(lambda optimizer, *_: clamp(optimizer, 0.02))
        steps(context, engine)
        check_within(engine, 0.02)
        hook.remove()
        steps(context, engine)
        clamp(optimizer, 0.01)
        engine.refresh_weights()
        check_within(engine, 0.01)
        steps(context, engine)


def rmsprop(model: nn.Module) -> Optimizer:
    return torch.optim.RMSprop(model.parameters(), lr=1e-3)


SETTINGS: dict[int, list[dict[str, Any]]] = {
    1: [
        {},
        {"precision": "bf16"},
        {"precision": "bf16", "offload": zero.Offload(optimizer="host", step="device")},
    ],
    3: [
        {"precision": "bf16"},
        {"precision": "bf16", "offload": zero.Offload(optimizer="host", params="host")},
        {"precision": "bf16", "offload": zero.Offload(optimizer="host", step="device")},
    ],
}


@pytest.mark.parametrize("stage", SETTINGS)
def test_weights_have_what_is_changed_through_the_optimizer(cluster: Clusters, stage: int) -> None:
    for settings in SETTINGS[stage]:
        cluster(2).run(clamped_body, settings={"stage": stage, **settings})


def refused_body(context: Context) -> None:
    engine = zero.initialize(model := fresh(), adamw(model), zero.Config(timeout=20))
    engine.backward(language_loss(model, 0, context.rank))
    with pytest.raises(zero.UsageError, match=r"call engine\.step\(\) first"):
        engine.refresh_weights()
    engine.step()
    with (
        zero.gathered(model),
        pytest.raises(zero.UsageError, match=r"refresh_weights\(\) was called inside zero\.gathered"),
    ):
        engine.refresh_weights()
    engine.refresh_weights()


def test_weights_are_refreshed_between_steps_only(cluster: Clusters) -> None:
    cluster(1).run(refused_body)


def refused_block_body(context: Context) -> None:
    models = [fresh(), fresh()]
    optimizers = [adamw(model) for model in models]
    first, second = (
        zero.initialize(model, optimizer, zero.Config(timeout=20))
        for model, optimizer in zip(models, optimizers, strict=True)
    )
    clamp(optimizers[1], 0.01)
    both = [parameter for model in models for parameter in model.parameters()]
    with pytest.raises(zero.UsageError, match=r"refresh_weights"), zero.gathered(both):
        pass
    steps(context, first)
    second.refresh_weights()
    steps(context, second)


def test_a_block_that_is_refused_holds_no_other_engine(cluster: Clusters) -> None:
    cluster(2).run(refused_block_body)


def averaged_body(context: Context, stage: int, settings: dict[str, Any]) -> list[str]:
    """Names whose average, kept of this rank's slices as the guide says, is not that of whole masters."""
    model = fresh()
    optimizer = adamw(model)
    engine = zero.initialize(model, optimizer, zero.Config(stage=stage, timeout=20, **settings))
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]

    def masters() -> list[Tensor]:
        return [piece.detach() for group in optimizer.param_groups for piece in group["params"]]

    average = [master.clone() for master in masters()]
    whole = {name: engine.full_master(name).clone() for name in names}
    for step in range(STEPS):
        train_on(engine, language_loss(model, step, context.rank))
        for mean, master in zip(average, masters(), strict=True):
            mean.lerp_(master, 0.25)
        for name, mean in whole.items():
            mean.lerp_(engine.full_master(name), 0.25)
    for master, value in zip(masters(), average, strict=True):
        master.copy_(value)
    engine.refresh_weights()
    wrong = [name for name in names if not torch.equal(engine.full_master(name), whole[name])]
    shown = engine.state_dict()
    return wrong + [n for n in shown if n in whole and not torch.equal(shown[n], whole[n].to(shown[n]).cpu())]


@pytest.mark.parametrize("stage", [1, 3])
def test_averages_of_slices_are_those_of_whole_masters(cluster: Clusters, stage: int) -> None:
    host = zero.Offload(optimizer="host")
    for settings in ({}, {"precision": "bf16"}, {"precision": "bf16", "offload": host}):
        for wrong in cluster(2).run(averaged_body, stage=stage, settings=settings):
            assert wrong == []
