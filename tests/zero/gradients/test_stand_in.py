"""`param.grad` between backward and step: it answers as unsharded training's gradients do."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.models import fresh, language_loss
from tests.zero.helpers.training import adamw, where_kernels_are

STEPS = 2
Use = Callable[[nn.Module], Any]


def with_gradient(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.grad is not None]


def not_empty(model: nn.Module) -> list[nn.Parameter]:
    """Torch knows no largest element of nothing."""
    return [p for p in with_gradient(model) if p.numel()]


def clip_in_parts(model: nn.Module) -> Tensor:
    gradients = [p.grad for p in with_gradient(model)]
    norm = nn.utils.get_total_norm(gradients)
    nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, norm)
    return norm


def each_by_its_place(model: nn.Module) -> None:
    for place, parameter in enumerate(with_gradient(model)):
        parameter.grad.mul_(0.5).div_(1 + place % 3)


def by_one_number(model: nn.Module) -> None:
    for parameter in with_gradient(model):
        parameter.grad *= 0.25
        parameter.grad.mul_(torch.tensor(0.5, device=parameter.device))


def by_a_number_that_changes(model: nn.Module) -> None:
    number = torch.tensor(0.5, device=next(model.parameters()).device)
    for parameter in with_gradient(model):
        parameter.grad.mul_(number)
        number.mul_(0.9)


def shifted(model: nn.Module) -> None:
    for parameter in with_gradient(model):
        parameter.grad.add_(0.01)
        parameter.grad.data.sub_(torch.full(parameter.shape, 0.005, device=parameter.device))


def written_to(model: nn.Module) -> None:
    """By an index, by `out`, and by an operator that has no method of that name."""
    for parameter in not_empty(model):
        parameter.grad[...] = parameter.grad[...] + 0.02
        torch.add(parameter.grad, 0.01, out=parameter.grad)
        parameter.grad -= 0.005


def some_zero(model: nn.Module) -> None:
    for parameter in with_gradient(model)[::2]:
        parameter.grad.fill_(float("inf"))
        parameter.grad.zero_()


def some_removed(model: nn.Module) -> None:
    for place, parameter in enumerate(with_gradient(model)):
        if place % 3 == 0:
            parameter.grad = None
        elif place % 3 == 1:
            del parameter.grad


CHANGES: dict[str, Use] = {
    "nothing": lambda m: None,
    "clip_grad_norm_": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.5),
    "clip_grad_norm_ one by one": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.5, foreach=False),
    "clip_grad_norm_ largest": lambda m: nn.utils.clip_grad_norm_(not_empty(m), 0.01, norm_type=torch.inf),
    "clip_grad_norm_ absolute": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1.0, norm_type=1),
    "clip_grad_norm_ of some": lambda m: nn.utils.clip_grad_norm_(list(m.parameters())[::2], 0.1),
    "clip_grad_value_": lambda m: nn.utils.clip_grad_value_(m.parameters(), 0.005),
    "clip in parts": clip_in_parts,
    "each by its place": each_by_its_place,
    "by one number": by_one_number,
    "by a number that changes": by_a_number_that_changes,
    "shifted": shifted,
    "written to": written_to,
    "some zero": some_zero,
    "some removed": some_removed,
    "zeros": lambda m: m.zero_grad(set_to_none=False),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1, local": {"stage": 1, "gradient_accumulation_steps": 2},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "accumulating": {"stage": 3, "gradient_accumulation_steps": 2},
    "bf16": {"stage": 3, "precision": "bf16"},
    "loss scale": {"stage": 3, "precision": "fp16", "loss_scale": 256.0},
    "host": {"stage": 3, "offload": zero.Offload(optimizer="host", gradients="host")},
    "copies": {"stage": 3, "shard_ranks": 2},
}


def averaged(model: nn.Module, step: int, ranks: int) -> None:
    """Leave in `grad` what data parallel training has, the mean over ranks."""
    for rank in range(ranks):
        (language_loss(model, step, rank) / ranks).backward()


@cache
def reference(context: Context, name: str, micro_steps: int) -> tuple[dict[str, Tensor], list[Any]]:
    """The weights after unsharded training on the batches of all ranks, and what the change returned. It is
    the same for all settings."""
    use = CHANGES[name]
    model = where_kernels_are(context, fresh())
    optimizer = adamw(model)
    told = []
    for step in range(STEPS):
        for micro in range(micro_steps):
            averaged(model, step * micro_steps + micro, context.size)
        for parameter in with_gradient(model):
            parameter.grad /= micro_steps
        told.append(use(model))
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}, told


MANY = ("stage 0", "stage 3")
FEW = ("clip_grad_norm_", "each by its place", "shifted", "some removed")  # for the other settings


def changed_body(context: Context, settings: dict[str, Any], changes: Sequence[str]) -> dict[str, float]:
    """By change, the largest relative difference of weights, and of what the call returned."""
    config = zero.Config(timeout=30, **settings)
    micro_steps, found = config.gradient_accumulation_steps or 1, {}
    for name in changes:
        use = CHANGES[name]
        expected, told = reference(context, name, micro_steps)
        model = fresh()
        engine = zero.initialize(model, adamw(model), config)
        off = 0.0
        for step in range(STEPS * micro_steps):
            engine.backward(language_loss(model, step, context.rank))
            if engine.is_boundary:
                back, there = use(model), told[step // micro_steps]
                if isinstance(back, Tensor):
                    off = max(off, abs(float(back) / float(there) - 1))
                engine.step()
        for key, value in engine.state_dict().items():
            if value.is_floating_point() and value.numel():
                off = max(off, float((value.float() - expected[key]).abs().max()))
        found[name] = off
    return found


@pytest.mark.parametrize("name", SETTINGS)
def test_changes_between_backward_and_step_are_those_of_unsharded_training(
    cluster: Clusters, name: str, device: str
) -> None:
    settings = SETTINGS[name]
    close = 2e-5 if "precision" not in settings else 0.06  # steps of Adam with lr 0.01, at 16 bits
    changes = list(CHANGES) if name in (MANY if device == "cpu" else MANY[1:]) else FEW
    workers = cluster(4 if name == "copies" else 2)
    for found in workers.run(changed_body, settings=settings, changes=changes, limit=120):
        assert {change: off for change, off in found.items() if off > close} == {}


READINGS: dict[str, Use] = {
    "a norm": lambda m: [float(p.grad.norm()) for p in with_gradient(m)],
    "other norms": lambda m: [float(torch.linalg.vector_norm(p.grad, torch.inf)) for p in not_empty(m)],
    "norms by rows": lambda m: [torch.linalg.vector_norm(p.grad, dim=-1).tolist() for p in with_gradient(m)],
    "all norms": lambda m: torch.stack(torch._foreach_norm([p.grad for p in with_gradient(m)])).tolist(),
    "the largest": lambda m: [float(p.grad.abs().max()) for p in not_empty(m)],
    "whether finite": lambda m: all(bool(p.grad.isfinite().all()) for p in with_gradient(m)),
    "whether some are not": lambda m: any(bool(p.grad.isnan().any()) for p in with_gradient(m)),
    "copies": lambda m: [p.grad.detach().clone().tolist() for p in with_gradient(m)],
    "whole tensors": lambda m: [
        (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad).tolist()
        for p in with_gradient(m)
    ],
    "doubles": lambda m: [p.grad.double().tolist() for p in with_gradient(m)],
    "memory of the host": lambda m: [p.grad.cpu().numpy().tolist() for p in with_gradient(m)],
    "sums": lambda m: [float((p.grad + 2 * p.grad).sum()) for p in with_gradient(m)],
    "a file": lambda m: [
        each.tolist() for each in torch.load(saved([p.grad for p in with_gradient(m)]), weights_only=True)
    ],
    "deep copies": lambda m: [copy.deepcopy(p.grad).tolist() for p in with_gradient(m)],
    "facts": lambda m: [(p.grad.shape, p.grad.dtype, p.grad.device == p.device) for p in with_gradient(m)],
}


def saved(values: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(values, file)
    file.seek(0)
    return file


def readings_body(context: Context, stage: int) -> None:
    plain = where_kernels_are(context, fresh())
    averaged(plain, 0, context.size)
    model = fresh()
    engine = zero.initialize(model, adamw(model), zero.Config(timeout=30, stage=stage))
    engine.backward(language_loss(model, 0, context.rank))
    for name, use in READINGS.items():
        there, here = use(plain), use(model)
        assert here == there or name != "facts", name
        if name != "facts":
            assert close(here, there), name
    norms, expected = engine.gradient_norms(), {n: p.grad for n, p in plain.named_parameters()}
    assert norms.keys() == {name for name, gradient in expected.items() if gradient is not None}
    for name, norm in norms.items():
        torch.testing.assert_close(norm.cpu(), expected[name].norm().cpu(), rtol=1e-4, atol=1e-8)
    assert engine.step()
    assert not with_gradient(model)


def close(here: Any, there: Any) -> bool:
    if isinstance(there, list):
        return len(here) == len(there) and all(map(close, here, there))
    return bool(abs(here - there) <= 1e-6 + 1e-4 * abs(there))


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_what_is_read_is_what_unsharded_training_has(cluster: Clusters, stage: int) -> None:
    cluster(2).run(readings_body, stage=stage)


ALONE: dict[str, tuple[Use, str]] = {
    "removed": (some_removed, "`.grad` was removed"),
    "multiplied": (lambda m: [p.grad.mul_(0.5) for p in with_gradient(m)], "multiplied before the last step"),
    "some multiplied": (lambda m: with_gradient(m)[0].grad.mul_(0.5), "multiplied before the last step"),
    "measured": (lambda m: with_gradient(m)[0].grad.norm(), "gradient norms"),
}


def alone_body(context: Context, use: str) -> str:
    model = fresh()
    engine = zero.initialize(model, adamw(model), zero.Config(timeout=5))
    with pytest.raises(zero.ZeroError) as raised:  # noqa: PT012 (a step later, or in the call)
        for step in range(2):
            engine.backward(language_loss(model, step, context.rank))
            if context.rank == 1:
                ALONE[use][0](model)
            engine.step()
    return str(raised.value)


@pytest.mark.parametrize("use", ALONE)
def test_what_one_rank_alone_does_is_told(cluster: Clusters, use: str) -> None:
    for told in cluster(2).run(alone_body, use=use):
        assert ALONE[use][1] in told


def clipped_body(context: Context, stage: int, precision: str) -> None:
    """A limit that is given with each step has the bits of the configured one."""
    runs = []
    for configured in (True, False):
        model = fresh()
        limit = 0.5 if configured else None
        config = zero.Config(timeout=30, stage=stage, precision=precision, clip_norm=limit)
        engine, norms = zero.initialize(model, adamw(model), config), []
        for step in range(3):
            engine.backward(language_loss(model, step, context.rank))
            norm = engine.grad_norm if configured else engine.clip_grad_norm_(0.5)
            engine.step()
            norms.append(float(engine.grad_norm if norm is None else norm))
        runs.append((norms, engine.state_dict()))
        with pytest.raises(zero.UsageError, match=r"before the last backward of an optimizer step"):
            engine.clip_grad_norm_(0.5)
    (norms, state), (again, other) = runs
    assert norms == again
    assert all(torch.equal(value, other[name]) for name, value in state.items())


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (3, "fp32"), (3, "bf16")])
def test_clipping_by_the_engine_has_the_bits_of_the_setting(
    cluster: Clusters, stage: int, precision: str
) -> None:
    cluster(2).run(clipped_body, stage=stage, precision=precision)


def scaled_body(context: Context) -> list[float]:
    """A GradScaler's part between backward and step: all ranks learn of one rank's overflow."""
    model = fresh()
    engine = zero.initialize(model, adamw(model), zero.Config(timeout=30))
    found = []
    for step in range(2):
        scaler = torch.amp.GradScaler(context.accelerator.device.type, init_scale=4.0)
        loss = scaler.scale(language_loss(model, step, context.rank))
        engine.backward(loss * (torch.inf if step == 1 and context.rank == 1 else 1.0))
        before = float(with_gradient(model)[0].grad.norm())
        scaler.unscale_(engine.optimizer)
        found.append(float(with_gradient(model)[0].grad.norm()) / before)
        found.append(sum(float(each) for each in scaler._found_inf_per_device(engine.optimizer).values()))
        engine.zero_grad()
    return found


def test_a_grad_scaler_unscales(cluster: Clusters) -> None:
    for ratio, found, _, overflow in cluster(2).run(scaled_body):
        assert (ratio, found, overflow) == (0.25, 0.0, 1.0)


def pieces_body(context: Context, config: dict[str, Any]) -> str:
    """Clip through the optimizer's parameters, as training loops do that know only the optimizer."""
    model = fresh()
    engine = zero.initialize(model, adamw(model), zero.Config(timeout=20, **config))
    listed = [p for group in engine.optimizer.param_groups for p in group["params"]]
    engine.backward(language_loss(model, 0, context.rank))
    with pytest.raises(zero.UsageError) as raised:
        nn.utils.clip_grad_norm_(listed, 1.0)
    assert engine.step()
    assert all(p.grad is None for p in listed)
    engine.backward(language_loss(model, 1, context.rank))
    engine.zero_grad()
    assert all(p.grad is None for p in listed)
    return str(raised.value)


@pytest.mark.parametrize("config", [{"stage": 1}, {"stage": 3}, {"offload": zero.Offload(optimizer="host")}])
def test_the_optimizers_own_parameters(cluster: Clusters, config: dict[str, Any]) -> None:
    for message in cluster(2).run(pieces_body, config=config):
        assert "through model.parameters()" in message


LATE = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, weight_decay=0.5),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, weight_decay=0.5),
    "adamw one by one": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, weight_decay=0.5, foreach=False),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.1, weight_decay=0.5),
}


def late_optimizer_body(context: Context, stage: int) -> None:
    """An optimizer made after the engine is refused before it decays any weight."""
    model = fresh()
    engine = zero.initialize(model, adamw(model), zero.Config(timeout=20, stage=stage))
    for make in LATE.values():
        engine.backward(language_loss(model, 0, context.rank))
        before = engine.state_dict()
        with pytest.raises(zero.UsageError, match="an optimizer asks for it that was made after"):
            make(model).step()
        after = engine.state_dict()
        assert all(torch.equal(value, after[name]) for name, value in before.items())
        assert engine.step()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_optimizer_made_later_does_not_step_in_silence(cluster: Clusters, stage: int) -> None:
    cluster(2).run(late_optimizer_body, stage=stage)


def places_body(context: Context) -> None:
    """They are there after the last micro-batch, for parameters that were used, with their shapes."""
    model = fresh()
    engine = zero.initialize(model, adamw(model), zero.Config(timeout=20, gradient_accumulation_steps=2))

    def having() -> set[str]:
        return {name for name, p in model.named_parameters() if p.grad is not None}

    engine.backward(language_loss(model, 0, context.rank))
    assert not having()
    engine.backward(language_loss(model, 1, context.rank))
    used = {n for n, p in model.named_parameters() if p.requires_grad and engine.full_gradient(n) is not None}
    assert having() == used
    assert used
    weight = model.blocks[0].up.weight
    assert isinstance(weight, nn.Parameter)
    assert repr(weight.grad).startswith("ShardedGradient(shape=(29, 12), dtype=torch.float32")
    assert (weight.grad.shape, weight.grad.dtype) == (weight.shape, weight.dtype)
    assert engine.step()
    assert not having()
    for _ in range(2):
        engine.backward(language_loss(model, 0, context.rank))
    assert having()
    with pytest.raises(zero.UsageError, match=r"engine\.backward"):
        language_loss(model, 0, context.rank).backward()
    engine.zero_grad()
    assert not having()


def test_where_they_are(cluster: Clusters) -> None:
    cluster(2).run(places_body)


def replaced(engine: zero.Engine) -> None:
    for parameter in engine.module.parameters():
        parameter.grad = torch.zeros(parameter.shape, device=parameter.device)


def removed_from_the_optimizers(engine: zero.Engine) -> None:
    for group in engine.optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


REFUSED: dict[str, tuple[Callable[[zero.Engine], None], str]] = {
    "replaced": (replaced, "in place, as in p.grad.copy_"),
    "of the optimizer's": (removed_from_the_optimizers, "optimizer.zero_grad()"),
}


def refused_body(context: Context, stage: int) -> None:
    """Changes that the engine would ignore are refused and have no effect; training continues without."""
    model, untouched = fresh(), fresh()
    engine, other = (
        zero.initialize(m, adamw(m), zero.Config(timeout=20, stage=stage)) for m in (model, untouched)
    )
    for step, (change, told) in enumerate(REFUSED.values()):
        engine.backward(language_loss(model, 90 + step, context.rank))
        change(engine)
        with pytest.raises(zero.UsageError) as raised:
            engine.step()
        assert told in str(raised.value)
        engine.zero_grad()
        for each in (engine, other):
            each.backward(language_loss(each.module, step, context.rank))
            assert each.step()
    state, expected = engine.state_dict(), other.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in state.items())


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_gradients_that_somebody_replaces_are_not_stepped_in_silence(cluster: Clusters, stage: int) -> None:
    cluster(2).run(refused_body, stage=stage)


class Products(nn.Module):
    """Three parameters of one unit, the second of which may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.ParameterList(torch.ones(4) for _ in range(3))

    def forward(self, x: torch.Tensor, skip: bool) -> torch.Tensor:
        for index, factor in enumerate(self.factors):
            x = x if skip and index == 1 else x * factor
        return x


def calls_body(context: Context, optimizer: str) -> list[int]:
    """Kernel calls for a unit's record in three steps; the second leaves out a parameter."""
    model = Products()
    made = {"SGD": torch.optim.SGD, "AdamW": torch.optim.AdamW}[optimizer](model.parameters(), lr=0.1)
    engine = zero.initialize(model, made, zero.Config(timeout=20))
    (owned,) = engine._boundary.optimizer.subs
    found = []
    for step in range(3):
        x = torch.ones(2, 4, device=context.accelerator.device)
        engine.backward(model(x, skip=step == 1).square().sum())
        found.append(len(list(owned.runs(owned.missing(next(iter(engine._reducer.all)).used)))))
        engine.step()
    return found


@pytest.mark.parametrize(("optimizer", "calls"), [("SGD", [1, 2, 1]), ("AdamW", [1, 2, 3])])
def test_only_step_counts_keep_pieces_apart(cluster: Clusters, optimizer: str, calls: list[int]) -> None:
    assert cluster(1).run(calls_body, optimizer=optimizer) == [calls]
