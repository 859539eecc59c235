"""Optimizers that need more than single elements: whole parameters, each stepped by one rank."""

from __future__ import annotations

import random
import re
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.models import fresh, language_loss, tokens
from tests.zero.helpers.training import (
    Run,
    adamw,
    exchanges_of,
    relative_error,
    same_bits,
    state_error,
    train_reference,
    train_zero,
)
from zero.optimizer.joint import JointOptimizer
from zero.optimizer.routes import Routes, route, share_out
from zero.sharding import layout
from zero.sharding.layout import ParameterSpec

STEPS = 6


class Trust(Optimizer):
    """Momentum, scaled by the norms of parameter and update as in LARS (You et al., 2017).

    It keeps tensors of other shapes than the parameter's, also in a list, and a number, and it puts matrices
    into new memory.
    """

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"rate": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                    state["norms"] = parameter.new_zeros(2)
                    state["sums"] = [parameter.new_zeros(3), torch.zeros_like(parameter)]
                    state["calls"] = 0
                state["momentum"].mul_(0.9).add_(parameter.grad)
                state["norms"].copy_(torch.stack([parameter.norm(), state["momentum"].norm()]))
                state["calls"] += 1
                state["sums"][0].add_(parameter.sum())
                state["sums"][1].add_(parameter)
                ratio = state["norms"][0] / (state["norms"][1] + 1e-6)
                stepped = parameter - group["rate"] * ratio * state["momentum"]
                if parameter.dim() == 2:
                    parameter.data = stepped
                else:
                    parameter.copy_(stepped)


def trust(model: nn.Module) -> Any:
    return Trust(model.parameters())


def adafactor(model: nn.Module) -> Any:
    """Adafactor, without parameters that have no elements, since it divides by their number."""
    return torch.optim.Adafactor([p for p in model.parameters() if p.numel()], lr=1e-2)


def muon(model: nn.Module) -> Any:
    """Muon as it is used: for blocks' matrices, beside AdamW for the rest, whose slices a kernel steps."""
    matrices = [p for name, p in model.named_parameters() if _is_muons(name, p)]
    chosen = set(matrices)
    rest = [p for p in model.parameters() if p not in chosen]
    return [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(rest, lr=1e-2)]


def slices(model: nn.Module) -> Any:
    """Two optimizers that work element-wise, one of them served by a kernel."""
    matrices, others = (
        [p for p in model.parameters() if (p.dim() == 2) is wanted] for wanted in (True, False)
    )
    return [torch.optim.RMSprop(matrices, lr=1e-3), torch.optim.AdamW(others, lr=1e-2)]


def kernels(model: nn.Module) -> Any:
    """Two optimizers served by kernels, with different state, in the same units."""
    every = list(model.parameters())
    return [torch.optim.AdamW(every[::2], lr=1e-2), zero.Lion(every[1::2], lr=1e-3)]


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "trust": trust,
    "adafactor": adafactor,
    "muon": muon,
    "slices": slices,
    "kernels": kernels,
}
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


def parity_body(context: Context, name: str) -> dict[str, Any]:
    each = lambda model: Each(OPTIMIZERS[name](model))  # noqa: E731
    reference = train_reference(context, fresh(), language_loss, each, STEPS, clip=0.5)
    runs = {stage: run_of(context, name, stage=stage, clip_norm=0.5) for stage in (0, 1, 2, 3)}
    again = run_of(context, name, stage=3, clip_norm=0.5)
    return {
        "loss": max(relative_error(run.losses, reference.losses) for run in runs.values()),
        "state": max(state_error(run.state, reference.state) if run.state else 0.0 for run in runs.values()),
        "same": same_bits(runs[1], runs[2]) and same_bits(runs[3], again),
    }


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_it_equals_data_parallel(cluster: Clusters, size: int, name: str) -> None:
    for found in cluster(size).run(parity_body, name=name, limit=120):
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
    for precision in ("fp32", "bf16"):
        for name in ("trust", "muon"):
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


def accumulation_body(context: Context) -> dict[str, bool]:
    """Micro-batches, and a loss scale that overflows first, for every optimizer."""
    result = {}
    for name in OPTIMIZERS:
        steps = {"gradient_accumulation_steps": 2}
        runs = [run_of(context, name, stage=stage, **steps) for stage in (0, 2, 3)]
        result[f"{name}, sums"] = all(relative_error(r.losses, runs[0].losses) < 3e-2 for r in runs)
        model = fresh()
        scaled = zero.Config(precision="fp16", loss_scale="dynamic", timeout=20)
        engine = zero.initialize(model, OPTIMIZERS[name](model), scaled)
        before = engine.full_master("blocks.0.up.weight")
        engine.backward(language_loss(model, 0, context.rank) * 1e9)
        engine.step()
        after = engine.full_master("blocks.0.up.weight")
        result[f"{name}, overflow"] = torch.equal(before, after)
        used = engine.full_master("gain")
        loss = model(tokens(0, context.rank, model))["loss"]
        engine.backward(loss / 1e3)
        engine.step()
        result[f"{name}, stepped"] = not torch.equal(used, engine.full_master("gain"))
    return result


def test_accumulation_and_overflow(cluster: Clusters) -> None:
    for found in cluster(2).run(accumulation_body, limit=120):
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
        engine.backward(engine(x, step).square().mean())
        engine.step()
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
        engine.backward(language_loss(model, step, context.rank))
        engine.step()
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
    engine.backward(language_loss(model, 3, context.rank))
    engine.step()
    return loaded


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_resumes_at_any_world_size(cluster: Clusters, tmp_path: Path, name: str) -> None:
    path = str(tmp_path / "step-3")
    saved = cluster(3).run(saving_body, path=path, name=name)[0]
    assert all(set(state) for state in saved["state"].values())
    for size, stage in ((1, 3), (2, 3), (2, 0), (4, 1)):
        for loaded in cluster(size).run(loading_body, path=path, name=name, stage=stage):
            for key, master in saved["masters"].items():
                assert torch.equal(master, loaded["masters"][key]), key
                assert saved["state"][key].keys() == loaded["state"][key].keys()
                for kind, value in saved["state"][key].items():
                    assert torch.equal(value, loaded["state"][key][kind]), (key, kind)


def _is_muons(name: str, parameter: nn.Parameter) -> bool:
    return parameter.dim() == 2 and "blocks" in name


def face_body(context: Context) -> dict[str, Any]:
    """What the user's optimizers show and refuse while an engine steps them."""
    model = fresh()
    optimizers = muon(model)
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 1, gamma=0.5) for each in optimizers]
    engine = zero.initialize(model, optimizers, zero.Config(timeout=20))
    engine.backward(language_loss(model, 0, context.rank))
    hooked: list[str] = []
    schedulers.append(torch.optim.lr_scheduler.StepLR(engine.optimizer, 1, gamma=1.0))
    for each in (*optimizers, engine.optimizer):
        each.register_step_pre_hook(lambda o, args, kwargs: ((*args,), kwargs))
        each.register_step_post_hook(lambda o, *_: hooked.append(type(o).__name__))
    for each in optimizers:
        with pytest.raises(zero.UsageError, match=r"call engine\.step"):
            each.step()
        with pytest.raises(zero.UsageError, match=r"engine\.save_checkpoint"):
            each.state_dict()
    engine.traffic.clear()
    engine.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a scheduler that has seen no step
        for scheduler in schedulers:
            scheduler.step()
    sizes = [p.numel() for group in engine.optimizer.param_groups for p in group["params"]]
    pieces = [piece for group in engine.optimizer.param_groups for piece in group["params"]]
    for use in (lambda p: p.tolist(), lambda p: p.lerp_(p, 0.5), lambda p: p.data, lambda p: p.norm()):
        with (
            torch.no_grad(),
            pytest.raises(zero.ShardedParameterError, match=r"it is here only during engine\.step\(\)"),
        ):
            use(pieces[0])
    return {
        "hooked": hooked,
        "rates": [group["lr"] for group in engine.optimizer.param_groups],
        "mine": sum(sizes),
        "stepped": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "whole": sum(p.numel() for n, p in model.named_parameters() if p.requires_grad and _is_muons(n, p)),
        "state": sum(v.numel() for s in engine.optimizer.state.values() for v in s.values() if v.dim()),
        "bytes": engine.traffic.bytes["all_to_all"],
    }


def test_the_optimizers_stay_the_users(cluster: Clusters) -> None:
    found = cluster(2).run(face_body)
    for each in found:
        assert each["hooked"] == ["Muon", "AdamW", "JointOptimizer"]
        assert each["rates"] == [5e-3, 5e-3]
        assert each["bytes"] == 3 * 4 * each["whole"]  # gradients, masters, and these back
    assert sum(each["mine"] for each in found) == found[0]["stepped"]
    assert max(each["mine"] for each in found) <= 4 / 3 * found[0]["stepped"] / 2
    assert all(each["state"] for each in found)


def refusals_body(context: Context) -> list[str]:
    def told(optimizer: Callable[[nn.Module], Any], **settings: Any) -> str:
        model = fresh()
        with pytest.raises(zero.ZeroError) as caught:
            zero.initialize(model, optimizer(model), zero.Config(timeout=20, **settings))
        return f"{type(caught.value).__name__}: {caught.value}"

    return [
        told(muon, whole_parameters=False),
        told(adamw, whole_parameters=True),
        told(muon, offload=zero.Offload(optimizer="disk", path=".")),
        told(muon, offload=zero.Offload(optimizer="host", overlap=True)),
        told(lambda model: []),
        told(lambda model: [adamw(model), None]),
        told(lambda model: [adamw(model), torch.optim.SGD([model.gain], lr=1)]),
        told(lambda model: [adamw(model), torch.optim.LBFGS([nn.Parameter(torch.ones(2))])]),
    ]


REFUSED = (
    "OptimizerError: Muon needs whole matrices",
    "OptimizerError: AdamW works element by element",
    "ConfigError: Offload(optimizer='disk') serves optimizers that kernels step: Adam, AdamW, SGD, Lion. "
    "This Muon",
    "ConfigError: Offload(overlap=True) serves optimizers that kernels step: Adam, AdamW, SGD, Lion. This "
    "Muon",
    "OptimizerError: the list of optimizers is empty",
    "OptimizerError: expected a torch.optim.Optimizer or a list of them, got NoneType",
    "OptimizerError: a parameter of shape () is in two optimizers, AdamW and SGD",
    "OptimizerError: LBFGS cannot be sharded",
)


@pytest.mark.parametrize("size", [1, 2])
def test_what_cannot_be_is_refused(cluster: Clusters, size: int) -> None:
    for messages in cluster(size).run(refusals_body):
        for message, start in zip(messages, REFUSED, strict=True):
            assert message.startswith(start), message


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
    engine.backward(language_loss(model, 0, context.rank))
    engine.step()
    return same_bits(runs[0], runs[1]) and same_bits(runs[0], runs[2]), engine.traffic.calls["all_to_all"]


def test_slices_on_request(cluster: Clusters) -> None:
    assert cluster(2).run(slices_body) == [(True, 0)] * 2


def test_parameters_are_shared_out_evenly() -> None:
    generator = random.Random(0)
    for _ in range(200):
        ranks, count = generator.randint(1, 9), generator.randint(0, 40)
        sizes = [generator.randint(0, 1000) for _ in range(count)]
        loads = [0] * ranks
        for index, rank in share_out(enumerate(sizes), ranks).items():
            loads[rank] += sizes[index]
        best = max(-(-sum(sizes) // ranks), max(sizes, default=0))
        pairs = sorted(sizes, reverse=True)[ranks - 1 : ranks + 1]  # two of these must share a rank
        best = max(best, sum(pairs) if len(pairs) == 2 else 0)
        assert max(loads) <= 4 / 3 * best


def test_routes_lead_to_whole_parameters_and_back() -> None:
    generator = random.Random(0)
    for _ in range(100):
        ranks = generator.randint(1, 5)
        sizes = [generator.choice((0, 1, 7, 64, 200)) for _ in range(generator.randint(1, 9))]
        specs = [ParameterSpec(str(i), (n,), (1,), n) for i, n in enumerate(sizes)]
        plan = layout.plan(specs, ranks, 4)
        owners = [generator.choice((None, *range(ranks))) for _ in sizes]
        buffer = list(range(plan.numel))
        routes = [route(plan, owners, rank) for rank in range(ranks)]
        sent = [_cut(buffer[plan.shard_slice(r)], routes[r]) for r in range(ranks)]
        for rank, mine in enumerate(routes):
            assert mine.total == routes[0].total
            received = [value for parts in sent for value in parts[rank]]
            assert len(received) == mine.numel
            for piece in mine.pieces:
                offset = plan.slots[piece.index].offset
                assert received[piece.shard_slice] == buffer[offset : offset + piece.length]
                assert owners[piece.index] == rank
            assert tuple(map(len, sent[rank])) == mine.given
            assert tuple(len(parts[rank]) for parts in sent) == mine.taken
        assert sum(mine.numel for mine in routes) == routes[0].total
        assert {p.index for r in routes for p in r.pieces} == {
            i for i, owner in enumerate(owners) if owner is not None and sizes[i]
        }


def _cut(values: list[int], routes: Routes) -> list[list[int]]:
    """What a rank sends to each rank."""
    flat = [value for window in routes.windows for value in values[window]]
    parts = []
    for count in routes.given:
        parts.append(flat[:count])
        flat = flat[count:]
    return parts


class Broken(Trust):
    """Fails on ranks where its first parameter has more than ten elements."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.param_groups[0]["params"][0].numel() > 10:
            raise ZeroDivisionError("this rank's own mistake")
        super().step()


def failing_body(context: Context) -> tuple[str, str]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.LayerNorm(8))
    config = zero.Config(whole_parameters=True, timeout=20)
    engine = zero.initialize(model, Broken(model.parameters()), config)
    engine.backward(engine(torch.ones(2, 8, device=context.accelerator.device)).square().sum())
    with pytest.raises(Exception, match=r"step|mistake") as caught:
        engine.step()
    with pytest.raises(zero.UsageError) as after:
        engine.save_checkpoint("nowhere")
    return f"{type(caught.value).__name__}: {caught.value}", str(after.value)


def test_a_step_that_fails_on_one_rank_holds_up_no_other(cluster: Clusters) -> None:
    found = cluster(2).run(failing_body, limit=15)
    assert sorted(message for message, _ in found) == [
        "OptimizerError: the step of Broken failed on another rank, whose error says why",
        "ZeroDivisionError: this rank's own mistake",
    ]
    assert all("interrupted" in after for _, after in found)


def mixed(model: nn.Module) -> Any:
    """Two optimizers that step themselves: matrices whole, and everything else by slices."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    return [torch.optim.Adafactor(matrices, lr=1e-2), torch.optim.RMSprop(others, lr=1e-3)]


def no_room_body(context: Context, offload: Any) -> list[tuple[str, float]]:
    """Let every allocation of a step fail in turn, on rank 1: the errors, and the seconds until them."""
    found: list[tuple[str, float]] = []
    said = [""]
    while not found or any(said):  # on any rank
        mine, seconds, said = starved_step(context, offload, len(found) + 1)
        found.append((mine, seconds))
    return found


def starved_step(context: Context, offload: Any, nth: int) -> tuple[str, float, list[str]]:
    from accelz_sim import faults

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(2)))
    config = zero.Config(precision="bf16", offload=offload, units=(nn.Sequential,), timeout=20)
    engine = zero.initialize(model, mixed(model), config)
    engine.backward(engine(torch.ones(2, 8, device=context.accelerator.device)).square().sum())
    began, said = time.monotonic(), ""
    fault = faults.out_of_memory(nth) if context.rank == 1 else nullcontext()
    try:
        with fault:
            engine.step()
    except zero.ZeroError as error:
        said = f"{type(error).__name__}: {error}"
    return said, time.monotonic() - began, engine._communicator.all_gather_object(said)


@pytest.mark.parametrize("offload", [None, zero.Offload(optimizer="host")])
def test_no_room_on_one_rank_holds_up_no_other(cluster: Clusters, device: str, offload: Any) -> None:
    if device != "sim":
        pytest.skip("needs a device whose allocations can fail")
    first, second = cluster(2).run(no_room_body, offload=offload, limit=90)
    assert len(first) == len(second) > 4
    for (said, seconds), (own, _) in zip(first[:-1], second, strict=False):
        assert "Adafactor and RMSprop failed on another rank" in said, own
        assert own.startswith("OutOfMemoryError: out of memory: no room"), own
        assert seconds < 5
    prefix = "OutOfMemoryError: out of memory: "
    told = {re.sub(r" unit '.*|, .*", "", own.removeprefix(prefix)) for own, _ in second[:-1]}
    here = {
        "no room for whole parameters of",
        "no room for the fp32 gradients of",
        "no room for the step of Adafactor and RMSprop",
    }
    assert told == {"no room to exchange whole parameters"} | (set() if offload else here)


def unreadable_body(context: Context, path: str, name: str) -> str:
    """Gradients are on disk, which fails on one rank."""
    from zero.tiers.stored import Stored

    tiers = zero.Offload(optimizer="host", params="disk", gradients="disk", path=path)
    model = fresh()
    made = {"rmsprop": lambda m: torch.optim.RMSprop(m.parameters()), "adafactor": adafactor, "mixed": mixed}
    engine = zero.initialize(model, made[name](model), zero.Config(offload=tiers, timeout=10))
    engine.backward(language_loss(model, 0, context.rank))

    def broken(self: Stored, device: torch.device) -> Tensor:
        raise zero.OffloadError("the disk is broken")

    with pytest.MonkeyPatch.context() as patch:
        if context.rank == 0:
            patch.setattr(Stored, "to", broken)
        with pytest.raises(zero.OffloadError) as caught:
            engine.step()
    return str(caught.value)


@pytest.mark.parametrize("name", ["adafactor", "rmsprop", "mixed"])
def test_a_gradient_that_one_rank_cannot_read(cluster: Clusters, tmp_path: Path, name: str) -> None:
    found = cluster(2).run(unreadable_body, path=str(tmp_path), name=name, limit=15)
    assert found == ["rank 0: the disk is broken"] * 2


def mismatch_body(context: Context, path: str) -> list[str]:
    def raised(call: Callable[[], object]) -> str:
        with pytest.raises(zero.ZeroError) as caught:
            call()
        return f"{type(caught.value).__name__}: {caught.value}"

    def built(optimizers: Callable[[list[nn.Parameter]], list[Optimizer]]) -> zero.Engine:
        model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
        return zero.initialize(model, optimizers(list(model.parameters())), zero.Config(timeout=10))

    def two(p: list[nn.Parameter]) -> list[Optimizer]:
        return [torch.optim.Muon(p[:2]), torch.optim.AdamW(p[2:])]

    saved = built(two)
    saved.backward(saved(torch.ones(2, 8, device=context.accelerator.device)).sum())
    saved.step()
    saved.save_checkpoint(path)
    other = built(lambda p: [torch.optim.Muon(p[:1]), torch.optim.AdamW(p[1:])])
    grouped = built(lambda p: [torch.optim.Muon(p[:1]), torch.optim.AdamW([{"params": [q]} for q in p[1:]])])
    late = built(two)
    extended = late.optimizer.optimizers[1]  # type: ignore[attr-defined]
    extended.param_groups.append({**extended.param_groups[0], "params": [nn.Parameter(torch.ones(2))]})
    late.backward(late(torch.ones(2, 8, device=context.accelerator.device)).sum())
    ranks_differ = lambda p: [torch.optim.NAdam(p) if context.rank else torch.optim.RAdam(p)]  # noqa: E731
    momenta = (0.9, 0.0, 0.0) if context.rank else (0.9, 0.9, 0.0)
    options_differ = lambda p: [torch.optim.SGD([q], momentum=m) for q, m in zip(p, momenta, strict=True)]  # noqa: E731
    return [
        raised(lambda: other.load_checkpoint(path)),
        raised(lambda: grouped.load_checkpoint(path)),
        raised(late.step),
        raised(lambda: built(ranks_differ)),
        raised(lambda: built(options_differ)),
    ]


def test_optimizers_that_do_not_fit_are_found(cluster: Clusters, tmp_path: Path) -> None:
    for messages in cluster(2).run(mismatch_body, path=str(tmp_path / "step-1")):
        assert messages[0].startswith(
            "StateError: the checkpoint does not fit: with different optimizer state: 1.weight "
            "(momentum_buffer)"
        )
        assert messages[1].startswith("StateError: the checkpoint's optimizer has 2 param_groups")
        assert messages[2].startswith(
            "OptimizerError: the optimizer's param_groups have different parameters"
        )
        for differing in messages[3:]:
            assert differing.startswith("RankMismatchError: the ranks disagree about the optimizer")


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
        engine.backward(loss)
        engine.step()
        return loss.detach()

    first, second = built(), built()
    stepped(first)
    first.save_checkpoint(path)
    second.load_checkpoint(path)
    return all(torch.equal(stepped(first), stepped(second)) for _ in range(2))


def test_state_of_other_strides_resumes(cluster: Clusters, tmp_path: Path) -> None:
    assert all(cluster(2).run(strides_body, path=str(tmp_path / "step-1")))


def test_what_may_look_at_all_parameters_is_told(cluster: Clusters) -> None:
    assert cluster(1).run(warning_body) == [["Trust will step whole parameters, each on one rank"]]


def warning_body(context: Context) -> list[str]:
    def told(optimizer: Callable[[nn.Module], Any], **settings: Any) -> list[str]:
        model = fresh()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            zero.initialize(model, optimizer(model), zero.Config(timeout=20, **settings))
        return [str(each.message).split(".")[0] for each in caught]

    known: list[Callable[[nn.Module], Any]] = [
        adafactor,
        muon,
        adamw,
        lambda model: zero.Lion(model.parameters(), lr=torch.tensor(1e-3)),
    ]
    quiet = [told(optimizer) for optimizer in known]
    quiet += [told(trust, whole_parameters=True), told(trust, stage=0)]
    assert not any(quiet), quiet
    return told(trust)


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
