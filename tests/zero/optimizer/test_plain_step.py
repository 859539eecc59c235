"""`optimizer.step()` and `optimizer.zero_grad()` of an engine's optimizer: ordinary loops train."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import StepLR

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.models import fresh, language_loss
from tests.zero.helpers.training import adamw, where_kernels_are

Backward = Callable[..., None]  # (micro-batch, factor of its loss)
Told = list[float]
Loop = Callable[[nn.Module, Sequence[Optimizer], Backward, str], Told]


def clipped(model: nn.Module, limit: float = 0.5) -> float:
    return float(nn.utils.clip_grad_norm_(model.parameters(), limit))


def usual(model: nn.Module, optimizers: Sequence[Optimizer], backward: Backward, device: str) -> Told:
    (optimizer,), told = optimizers, []
    scheduler = StepLR(optimizer, 2, gamma=0.5)
    for step in range(4):
        backward(step)
        told.append(clipped(model))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return [*told, *(group["lr"] for group in optimizer.param_groups)]


def zeroed_first(model: nn.Module, optimizers: Sequence[Optimizer], backward: Backward, device: str) -> Told:
    for step in range(3):
        optimizers[0].zero_grad()
        backward(step)
        optimizers[0].step()
    return [float(all(p.grad is None for p in model.parameters()))]


def never_zeroed(model: nn.Module, optimizers: Sequence[Optimizer], backward: Backward, device: str) -> Told:
    """Gradients add up, those that were clipped included."""
    told = []
    for step in range(3):
        backward(step)
        told.append(clipped(model, 2.0))
        optimizers[0].step()
    return told


def zeros(model: nn.Module, optimizers: Sequence[Optimizer], backward: Backward, device: str) -> Told:
    """With gradients of zero, weights decay and moments fade."""
    backward(0)
    optimizers[0].step()
    optimizers[0].zero_grad(set_to_none=False)
    optimizers[0].step()
    backward(1)
    optimizers[0].step()
    return [clipped(model)]


def stepped_again(model: nn.Module, optimizers: Sequence[Optimizer], backward: Backward, device: str) -> Told:
    backward(0)
    optimizers[0].step()
    optimizers[0].step()
    told = [clipped(model)]
    optimizers[0].zero_grad()
    optimizers[0].step()  # without gradients: nothing
    return told


def closures(model: nn.Module, optimizers: Sequence[Optimizer], backward: Backward, device: str) -> Told:
    told = []
    for step in range(3):

        def closure(step: int = step) -> float:
            optimizers[0].zero_grad()
            backward(step)
            return clipped(model)

        told.append(optimizers[0].step(closure))
    return told


def by_the_model(model: nn.Module, optimizers: Sequence[Optimizer], backward: Backward, device: str) -> Told:
    for step in range(4):
        backward(step)
        optimizers[0].step()
        if step % 2:
            model.zero_grad()
        else:
            for parameter in model.parameters():
                parameter.grad = None
    return []


def some_dropped(model: nn.Module, optimizers: Sequence[Optimizer], backward: Backward, device: str) -> Told:
    """A gradient that is removed takes no part, in the step and in the sum that follows."""
    told = []
    for step in range(3):
        backward(step)
        list(model.parameters())[-1].grad = None
        if step != 1:
            optimizers[0].step()
        told.append(clipped(model))
    return told


def windows(model: nn.Module, optimizers: Sequence[Optimizer], backward: Backward, device: str) -> Told:
    """Three micro-batches, and two at the end of the epoch."""
    told = []
    for window in ((0, 1, 2), (3, 4)):
        for micro in window:
            backward(micro, 1 / len(window))
        told.append(clipped(model))
        optimizers[0].step()
        optimizers[0].zero_grad()
    return told


def scaled(model: nn.Module, optimizers: Sequence[Optimizer], backward: Backward, device: str) -> Told:
    """A GradScaler, with an overflow on one rank."""
    scaler, told = torch.amp.GradScaler(device, init_scale=2.0**8, growth_interval=2), []
    for step in range(5):
        backward(step, scaler, float("inf") if step == 2 else 1.0)
        if step % 2:
            scaler.unscale_(optimizers[0])
            told.append(clipped(model))
        scaler.step(optimizers[0])
        scaler.update()
        optimizers[0].zero_grad()
        told.append(scaler.get_scale())
    return told


def in_turns(model: nn.Module, optimizers: Sequence[Optimizer], backward: Backward, device: str) -> Told:
    """A backward for each optimizer."""
    for step in range(4):
        backward(step)
        optimizers[step % 2].step()
        optimizers[step % 2].zero_grad()
    return [clipped(model)]


def both_in_a_window(
    model: nn.Module, optimizers: Sequence[Optimizer], backward: Backward, device: str
) -> Told:
    schedulers, told = [StepLR(each, 1, gamma=0.5) for each in optimizers], []
    for step in range(3):
        backward(step)
        told.append(clipped(model))
        for optimizer in optimizers:
            optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
        for each in optimizers:
            each.zero_grad()
    return told


def split(model: nn.Module, kinds: Sequence[Callable[..., Optimizer]]) -> list[Optimizer]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [kind(parameters[i :: len(kinds)], lr=1e-3) for i, kind in enumerate(kinds)]


def muon_and_adamw(model: nn.Module) -> list[Optimizer]:
    matrices = [p for p in model.parameters() if p.requires_grad and p.dim() == 2 and p.numel()]
    others = [p for p in model.parameters() if p.requires_grad and not (p.dim() == 2 and p.numel())]
    return [torch.optim.Muon(matrices, lr=1e-3), torch.optim.AdamW(others, lr=1e-3)]


ONE: dict[str, Loop] = {
    "usual": usual,
    "zeroed first": zeroed_first,
    "never zeroed": never_zeroed,
    "zeros": zeros,
    "stepped again": stepped_again,
    "closures": closures,
    "by the model": by_the_model,
    "some dropped": some_dropped,
    "windows": windows,
    "scaled": scaled,
}
TWO: dict[str, Loop] = {"in turns": in_turns, "both in a window": both_in_a_window}
MADE: dict[str, Callable[[nn.Module], Sequence[Optimizer]]] = {
    "AdamW": lambda m: [adamw(m)],
    "fused": lambda m: [torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True)],
    "RMSprop": lambda m: [torch.optim.RMSprop(m.parameters(), lr=1e-3)],
    "AdamW twice": lambda m: split(m, (torch.optim.AdamW, torch.optim.AdamW)),
    "AdamW and RMSprop": lambda m: split(m, (torch.optim.AdamW, torch.optim.RMSprop)),
    "Muon and AdamW": muon_and_adamw,
}
HOST = zero.Offload(optimizer="host", gradients="host")
RUNS: dict[str, tuple[dict[str, Any], dict[str, Loop], Sequence[str]]] = {
    "stage 0": ({"stage": 0}, ONE, ["AdamW"]),
    "stage 1": ({"stage": 1}, ONE, ["AdamW"]),
    "stage 2, local": ({"stage": 2, "accumulate": "local"}, ONE, ["AdamW"]),
    "stage 3": ({"stage": 3}, ONE, ["AdamW", "RMSprop"]),
    "fused": ({"stage": 3}, {"usual": usual, "scaled": scaled}, ["fused"]),
    "whole": ({"whole_parameters": True}, {"scaled": scaled}, ["RMSprop"]),
    "host": ({"stage": 3, "offload": HOST}, ONE, ["AdamW"]),
    "two at stage 1": ({"stage": 1}, TWO, ["AdamW twice"]),
    "two at stage 3": ({"stage": 3}, TWO, ["AdamW twice", "AdamW and RMSprop", "Muon and AdamW"]),
    "two on the host": ({"stage": 3, "offload": HOST}, TWO, ["AdamW twice"]),
}


def backward_of(model: nn.Module, ranks: Sequence[int], mean: int) -> Backward:
    """Backwards through the batches of these ranks; the loss is the mean over `mean` of them."""

    def backward(step: int, by: Any = 1.0, of_the_last: float = 1.0) -> None:
        for rank in ranks:
            loss = language_loss(model, step, rank) / mean
            loss = loss * of_the_last if rank == 1 else loss
            (by.scale(loss) if isinstance(by, torch.amp.GradScaler) else loss * by).backward()

    return backward


def run_body(context: Context, run: str) -> dict[str, float]:
    """By loop and optimizer, the largest difference of weights and of what the loop has returned."""
    settings, loops, makers = RUNS[run]
    found = {}
    for name, loop in loops.items():
        for maker in makers:
            plain = where_kernels_are(context, copy.deepcopy(fresh()))
            backward = backward_of(plain, range(context.size), context.size)
            kind = next(plain.parameters()).device.type
            expected = loop(plain, MADE[maker](plain), backward, kind)
            model = fresh()
            optimizers = MADE[maker](model)
            engine = zero.initialize(model, optimizers, zero.Config(timeout=20, **settings))
            told = loop(model, optimizers, backward_of(model, [context.rank], 1), engine.device.type)
            off = max((abs(a - b) for a, b in zip(told, expected, strict=True)), default=0.0)
            weights: dict[str, Tensor] = dict(plain.state_dict())
            for key, value in engine.state_dict().items():
                if value.numel():
                    off = max(off, float((value - weights[key].cpu()).abs().max()))
            found[f"{name}, {maker}"] = off
    return found


@pytest.mark.parametrize("run", RUNS)
def test_ordinary_loops_train_as_without_an_engine(cluster: Clusters, run: str) -> None:
    for found in cluster(2).run(run_body, run=run, limit=200):
        assert {name: off for name, off in found.items() if not off < 5e-5} == {}


def face_body(context: Context) -> None:
    """What others see of the optimizer, and what they have wrapped around it."""
    model, called = fresh(), []
    optimizer = adamw(model)
    early = StepLR(optimizer, 1, gamma=0.5)
    optimizer.register_step_post_hook(lambda *_: called.append("hook"))
    engine = zero.initialize(model, optimizer, zero.Config(timeout=20))
    assert engine.optimizer is optimizer
    assert isinstance(optimizer, torch.optim.AdamW)
    assert type(optimizer).__name__ == "AdamW"
    assert repr(optimizer).startswith("AdamW")
    late, inner = StepLR(optimizer, 1, gamma=0.5), optimizer.step
    language_loss(model, 0, context.rank).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a scheduler that has seen no step
        optimizer.step()
        early.step()
        late.step()

    def wrapper(*args: Any) -> Any:
        called.append("wrapper")
        return inner(*args)

    optimizer.step = wrapper  # type: ignore[method-assign]
    language_loss(model, 0, context.rank).backward()
    with pytest.raises(zero.OptimizerError, match=r"call optimizer\.step\(\)"):
        engine.step()
    optimizer.step()
    assert called == ["hook", "wrapper", "hook"]
    assert engine.steps == 2
    assert optimizer.param_groups[0]["lr"] == 0.0025


def test_who_has_the_optimizer_drives_the_engine(cluster: Clusters) -> None:
    cluster(2).run(face_body)


class Imitation:
    """A wrapper that makes itself one of the optimizer's class, and has nothing of it, as Lightning's do."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.inner = optimizer
        self.__class__ = type("Imitation", (Imitation, type(optimizer)), {})

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def imitated_body(context: Context) -> None:
    model = fresh()
    optimizer = adamw(model)
    engine = zero.initialize(model, optimizer, zero.Config(timeout=20))
    imitation: Any = Imitation(optimizer)
    language_loss(model, 0, context.rank).backward()
    imitation.step()
    imitation.zero_grad()
    assert engine.steps == 1
    assert all(p.grad is None for p in model.parameters())


def test_a_wrapper_of_the_optimizers_class_drives_the_engine(cluster: Clusters) -> None:
    cluster(2).run(imitated_body)


def counted_body(context: Context) -> None:
    model = fresh()
    optimizer = adamw(model)
    config = zero.Config(timeout=20, gradient_accumulation_steps=2)
    engine = zero.initialize(model, optimizer, config)
    optimizer.zero_grad()  # there are none
    engine.backward(language_loss(model, 0, context.rank))
    for call, instead in ((optimizer.step, r"engine\.step"), (optimizer.zero_grad, r"engine\.zero_grad")):
        with pytest.raises(zero.UsageError, match=instead):
            call()
    engine.backward(language_loss(model, 1, context.rank))
    assert engine.step()
    taken = torch.optim.AdamW.step
    with pytest.raises(zero.UsageError, match="taken before"):
        taken(optimizer)


def test_an_engine_that_counts_refuses_the_optimizers_step(cluster: Clusters) -> None:
    cluster(2).run(counted_body)


def unscaled_body(context: Context) -> None:
    """fp16 needs a scale: the engine's, or a GradScaler's, and never both in one step."""
    model = fresh()
    optimizer = adamw(model)
    engine = zero.initialize(model, optimizer, zero.Config(timeout=20, precision="fp16"))
    language_loss(model, 0, context.rank).backward()
    with pytest.raises(zero.UsageError, match="GradScaler"):
        optimizer.step()
    with pytest.raises(zero.UsageError, match="cannot be added up"):
        engine.backward(language_loss(model, 0, context.rank))
    optimizer.zero_grad()
    scaler = torch.amp.GradScaler(engine.device.type, init_scale=64.0)
    scaler.scale(language_loss(model, 0, context.rank)).backward()
    scaler.unscale_(optimizer)
    norm = clipped(model)
    optimizer.zero_grad()
    scale = float(engine.loss_scale)
    engine.backward(language_loss(model, 0, context.rank))
    optimizer.step()  # overflows with the first scale, so that the next is another
    assert float(engine.loss_scale) in (scale, scale / 2)
    while float(engine.loss_scale) == scale:  # or a later one does
        engine.backward(language_loss(model, 0, context.rank) * 2.0**40)
        optimizer.step()
    optimizer.zero_grad()
    engine.backward(language_loss(model, 0, context.rank))
    assert abs(clipped(model) / norm - 1) < 0.5


def test_half_precision_needs_a_scale(cluster: Clusters) -> None:
    cluster(2).run(unscaled_body)


def gone_body(context: Context, path: str) -> None:
    model = fresh()
    optimizer = adamw(model)
    engine = zero.initialize(model, optimizer, zero.Config(timeout=20))
    language_loss(model, 0, context.rank).backward()
    optimizer.step()
    engine.save_checkpoint(path)  # with gradients that were stepped
    with pytest.raises(zero.UsageError, match="zero_grad"):
        engine.offload_states()
    optimizer.zero_grad()
    language_loss(model, 1, context.rank).backward()
    with pytest.raises(zero.UsageError, match="between the micro-batches"):
        engine.save_checkpoint(path)
    assert engine.load_checkpoint(path).steps == engine.steps == 1
    assert all(p.grad is None for p in model.parameters())
    del engine
    gc.collect()
    with pytest.raises(zero.UsageError, match=r"keep what zero\.initialize returns"):
        optimizer.step()


def test_between_step_and_zero_grad(cluster: Clusters, tmp_path: Path) -> None:
    cluster(2).run(gone_body, path=str(tmp_path / "saved"))


def small_body(context: Context) -> tuple[list[float], float]:
    """An optimizer of one number, of which most ranks have no part."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    model.temperature = nn.Parameter(torch.ones(()))
    optimizers = [
        torch.optim.SGD([model.weight, model.bias], lr=0.1),
        torch.optim.Adagrad([model.temperature], lr=0.1),
    ]
    engine = zero.initialize(model, optimizers, zero.Config(timeout=20))
    scaler, found = torch.amp.GradScaler(engine.device.type, init_scale=4.0), []
    for step in range(3):
        x = torch.full((2, 4), 1.0 + step, device=engine.device)
        scaled = model(x).square().mean() * (torch.inf if (step, context.rank) == (1, 0) else 1.0)
        with zero.gathered(model):
            scaler.scale(scaled * model.temperature).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()
        found.append(scaler.get_scale())
    return found, float(engine.full_master("temperature"))


def test_a_rank_may_have_no_part_of_an_optimizer(cluster: Clusters) -> None:
    results = cluster(3).run(small_body)
    assert results == [results[0]] * 3
    assert results[0][0] == [4.0, 2.0, 2.0]
    assert results[0][1] != 1.0


def moved_body(context: Context) -> None:
    """Records that move between backward and step, as to make room for an evaluation."""
    model = fresh()
    optimizer = adamw(model)
    engine = zero.initialize(model, optimizer, zero.Config(timeout=20))
    scaler = torch.amp.GradScaler(engine.device.type, init_scale=4.0)
    for step in range(2):
        scaler.scale(language_loss(model, step, context.rank)).backward()
        engine._boundary.optimizer.offload_state()
        engine._boundary.optimizer.reload_state()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert engine.steps == 2


def test_records_may_move_between_backward_and_step(cluster: Clusters) -> None:
    cluster(2).run(moved_body)
