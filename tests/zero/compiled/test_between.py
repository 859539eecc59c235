"""What comes between forwards and their backwards, or around them: other weights, hooks on what is saved."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.optim import Optimizer

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.conftest import Abilities
from tests.zero.helpers.compiled_models import WIDTH, Transformer, tokens
from tests.zero.helpers.models import device_of
from tests.zero.helpers.training import adamw

AOT = zero.Compile(inner="aot_eager")


class Layers(nn.Module):
    """Three layers and a loss: one graph, that has to gather all but the first again for its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, 600)
        self.head = nn.Linear(600, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x))))).square().mean()


def build(compile: zero.Compile | None, **settings: Any) -> zero.Engine:
    torch.manual_seed(7)
    model = Layers()
    return zero.initialize(model, adamw(model), zero.Config(compile=compile, timeout=20, **settings))


def batch(engine: zero.Engine, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + engine.rank)
    return torch.randn(4, WIDTH, generator=generator).to(device_of(engine.module))


def train(engine: zero.Engine, step: int) -> float:
    loss = engine(batch(engine, step))
    engine.backward(loss)
    engine.step()
    return float(loss)


def halve(engine: zero.Engine) -> None:
    with torch.no_grad():
        for group in engine.optimizer.param_groups:
            for piece in group["params"]:
                piece.mul_(0.5)
    engine.refresh_weights()


def write(engine: zero.Engine) -> None:
    with zero.gathered(engine.module, write_rank=0), torch.no_grad():
        engine.module.head.weight.mul_(0.5)


def go(engine: zero.Engine) -> None:
    engine.offload_states()
    engine.reload_states()


def changes(path: str, state: dict[str, Tensor]) -> dict[str, Callable[[zero.Engine], Any]]:
    """What changes the weights, by name."""
    return {
        "load_checkpoint": lambda engine: engine.load_checkpoint(Path(path, "saved")),
        "load_state_dict": lambda engine: engine.load_state_dict(state),
        "load_pretrained": lambda engine: engine.load_pretrained(Path(path, "whole.safetensors")),
        "refresh_weights": halve,
        "gathered": write,
        "step": lambda engine: train(engine, 5),
    }


def between_body(context: Context, path: str, compile: zero.Compile | None, stage: int) -> dict[str, Any]:
    """What a backward says behind each change of the weights; and training through what changes nothing."""
    engine = build(compile, stage=stage)
    found: dict[str, Any] = {}
    engine.save_checkpoint(Path(path, "saved"))
    state = engine.state_dict()
    if context.rank == 0:
        save_file(state, Path(path, "whole.safetensors"))
    for name, change in changes(path, state).items():
        loss = engine(batch(engine, 1))
        change(engine)
        with pytest.raises(zero.UsageError) as caught:
            engine.backward(loss)
        found[name] = str(caught.value)
    engine.load_checkpoint(Path(path, "saved"))
    found["expected"] = [train(engine, step) for step in range(3)]
    engine.load_checkpoint(Path(path, "saved"))
    found["losses"] = []
    for step in range(3):
        engine.offload_states()
        engine.reload_states()
        loss = engine(batch(engine, step))
        go(engine)
        engine.backward(loss)
        engine.step()
        found["losses"].append(float(loss))
    return found


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("compile", [None, AOT])
def test_a_backward_does_not_go_on_with_other_weights(
    cluster: Clusters, tmp_path: Path, compile: zero.Compile | None, stage: int
) -> None:
    for found in cluster(2).run(between_body, path=str(tmp_path), compile=compile, stage=stage, limit=120):
        assert found.pop("losses") == found.pop("expected")
        assert len(found) == 6
        for name, message in found.items():
            assert "the weights have changed since the forward" in message, name


@contextmanager
def counting(seen: list[int]) -> Iterator[None]:
    """Hooks that take what is saved to the host, noting its size."""

    def pack(tensor: Tensor) -> tuple[torch.device, Tensor]:
        seen.append(tensor.numel())
        return tensor.device, tensor.cpu()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed[1].to(packed[0])):
        yield


def saved_body(context: Context, stage: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    seen: list[int] = []
    around = {"none": None, "host": save_on_cpu, "counted": lambda: counting(seen)}
    for name, hooks in around.items():
        engine = build(AOT if hooks else None, stage=stage)
        found[name] = []
        for step in range(3):
            if hooks is None:
                loss = engine(batch(engine, step))
            else:
                with hooks():
                    loss = engine(batch(engine, step))
            engine.backward(loss)
            engine.step()
            found[name].append(float(loss))
    sizes = {parameter.numel() for parameter in engine.module.parameters()}
    return found | {"seen": set(seen), "sizes": sizes, "mode": engine.explain().mode}


@pytest.mark.parametrize("stage", [0, 3])
def test_hooks_on_what_is_saved_do_not_see_parameters(cluster: Clusters, stage: int) -> None:
    for found in cluster(2).run(saved_body, stage=stage, limit=120):
        assert found["mode"] == "graph"
        assert found["host"] == found["counted"] == found["none"]
        assert found["seen"].isdisjoint(found["sizes"])


class Deep(nn.Module):
    """Layers that are larger than what they compute."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4 * WIDTH, 4 * WIDTH) for _ in range(8)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layers(x)).square().mean()


def several_body(context: Context, stage: int) -> dict[str, tuple[int, list[Tensor], int]]:
    """By path: the peak of a step with three forwards before one backward, gradients, and reduced bytes."""
    found, memory = {}, context.accelerator.memory
    for name, compile in (("eager", None), ("compiled", AOT)):
        torch.manual_seed(7)
        model = Deep()
        units = {"units": ("Linear",)} if stage == 3 else {}
        config = zero.Config(compile=compile, timeout=20, stage=stage, **units)
        engine = zero.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), config)
        for _ in range(2):
            gc.collect()
            engine.traffic.clear()
            memory.reset_peak()
            before = memory.stats().allocated
            xs = [batch(engine, step).repeat(1, 4) for step in range(3)]
            thrown_away = engine(xs[0])
            engine.backward(sum(engine(x) for x in xs))
            del thrown_away
            peak = memory.stats().peak - before
            gradients = [engine.full_gradient(name).cpu() for name, _ in model.named_parameters()]
            engine.step()
        found[name] = peak, gradients, engine.traffic.bytes["all_reduce" if stage == 0 else "reduce_scatter"]
    return found


@pytest.mark.parametrize(("size", "stage"), [(1, 0), (2, 0), (2, 2), (2, 3)])
def test_several_forwards_before_a_backward(
    cluster: Clusters, abilities: Abilities, size: int, stage: int
) -> None:
    """In no more memory than without compile. Whole gradients that stay anyway are added up before they are
    reduced; gathered units' are reduced in each graph."""
    for found in cluster(size).run(several_body, stage=stage, limit=120):
        (eager_peak, expected, once), (peak, gradients, reduced) = found["eager"], found["compiled"]
        assert reduced == (3 if stage == 3 else 1) * once
        torch.testing.assert_close(gradients, expected)
        if abilities.exact:
            assert peak < 1.02 * eager_peak


SETTINGS: dict[str, dict[str, Any]] = {
    "accumulation, some stay whole": {"gradient_accumulation_steps": 2, "persistent_below": 200},
    "local accumulation, gradients on the host": {
        "gradient_accumulation_steps": 2,
        "accumulate": "local",
        "offload": zero.Offload(optimizer="host", gradients="host"),
    },
    "clipped": {"clip_norm": 0.1, "stage": 2},
    "sent in bf16": {"reduce_dtype": "bf16", "persistent_below": 200},
}


def several_steps(engine: zero.Engine) -> list[Tensor]:
    """Losses of steps with one to three forwards before each backward, and the masters in the end."""
    losses, number = [], 0
    for forwards in (1, 3, 2, 3):
        while not engine.is_boundary:
            sequences = [tokens(10 * number + n, engine.rank, engine.module) for n in range(forwards)]
            loss = sum(engine(sequence) for sequence in sequences)
            engine.backward(loss)
            losses.append(loss.detach().cpu())
            number += 1
        engine.step()
    return losses + [engine.full_master(name).cpu() for name, _ in engine.module.named_parameters()]


def steady(model: nn.Module) -> Optimizer:
    """An optimizer that does not magnify the rounding of gradients near zero, as Adam's tiny eps does."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def settings_body(context: Context) -> dict[str, tuple[list[Tensor], list[Tensor]]]:
    """One rank alone has all units resident, whatever the settings: the first two are enough."""
    found = {}
    for name, settings in list(SETTINGS.items())[: 2 if context.size == 1 else None]:
        values = []
        for compile in (None, AOT):
            torch.manual_seed(7)
            model = Transformer()
            config = zero.Config(compile=compile, timeout=20, **settings)
            values.append(several_steps(zero.initialize(model, steady(model), config)))
        found[name] = values[0], values[1]
    return found


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.host), 2])
def test_several_forwards_train_alike_with_other_settings(cluster: Clusters, size: int) -> None:
    for found in cluster(size).run(settings_body, limit=200):
        for name, (eager, compiled) in found.items():
            atol = 2e-3 if name == "sent in bf16" else 2e-6
            torch.testing.assert_close(
                compiled, eager, atol=atol, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )


def compiled_late_body(context: Context) -> tuple[str, str]:
    """A forward that is compiled between a backward and its step, where parameters have gradients."""
    engine = build(AOT)
    engine.backward(engine(batch(engine, 0)))
    with torch.no_grad():
        engine(batch(engine, 1)[:2])
    engine.step()
    train(engine, 2)
    return engine.explain().mode, engine.explain().why


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_a_forward_is_compiled_beside_gradients(cluster: Clusters, size: int) -> None:
    for mode, why in cluster(size).run(compiled_late_body, limit=120):
        assert (mode, why) == ("graph", "")
