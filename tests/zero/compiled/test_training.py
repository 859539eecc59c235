"""Compiled training has the losses and weights of eager training, whatever path the model takes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.compiled_models import fresh, tokens
from tests.zero.helpers.loops import train_on
from tests.zero.helpers.models import LanguageModel, device_of
from tests.zero.helpers.models import tokens as small_tokens
from tests.zero.helpers.training import adamw, relative_error, same_bits, train_zero
from tests.zero.helpers.worlds import UP_TO_TWO

AOT = zero.Compile(inner="aot_eager")
STEPS = 4


def plain_loss(model: nn.Module, step: int, rank: int) -> Tensor:
    return model(tokens(step, rank, model))


def autocast_loss(model: nn.Module, step: int, rank: int) -> Tensor:
    with torch.autocast(device_of(model).type, torch.bfloat16):
        return model(tokens(step, rank, model))


def lengths_loss(model: nn.Module, step: int, rank: int) -> Tensor:
    """Another length every step, and every rank its own."""
    return model(tokens(step, rank, model, length=5 + (2 * step + rank) % 4))


def evaluating_loss(model: nn.Module, step: int, rank: int) -> Tensor:
    """Evaluation and a loss that is thrown away before the real one."""
    with torch.no_grad():
        model(tokens(step + 50, rank, model))
    model(tokens(step + 60, rank, model))
    return model(tokens(step, rank, model))


def held_loss(model: nn.Module, step: int, rank: int) -> Tensor:
    with zero.gathered(model):
        return model(tokens(step, rank, model))


def part_loss(model: nn.Module, step: int, rank: int) -> Tensor:
    """A module of the model called by itself is eager."""
    assert isinstance(model.blocks, nn.ModuleList)
    features = torch.ones(1, 4, 32, device=device_of(model))
    return model(tokens(step, rank, model)) + model.blocks[0](features).square().mean()


def train(
    context: Context,
    compile: zero.Compile | None,
    loss: Callable[[nn.Module, int, int], Tensor] = plain_loss,
    path: str = "straight",
    **settings: Any,
) -> Any:
    return train_zero(
        context, fresh(path), loss, zero.Config(compile=compile, timeout=20, **settings), adamw, STEPS
    )


SAME_BITS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"precision": "bf16"},
    "autocast": {"loss": autocast_loss},
    "stage 2": {"stage": 2},
    "accumulated": {"gradient_accumulation_steps": 2},
    "accumulated locally": {"gradient_accumulation_steps": 2, "accumulate": "local"},
    "persistent": {"persistent_below": 100},
    "lengths": {"loss": lengths_loss},
    "evaluating": {"loss": evaluating_loss},
    "held": {"loss": held_loss},
    "offloaded": {"offload": zero.Offload(optimizer="host", params="host")},
    "placed by measurement": {"offload": "auto"},
    "checkpointed": {"path": "checkpointed"},
}

TOGETHER = (
    ("bf16", "stage 2", "accumulated"),
    ("autocast", "checkpointed"),
    ("lengths", "persistent"),
    ("evaluating", "accumulated locally"),
    ("plain", "held", "offloaded"),
    ("placed by measurement",),
)
"""Each of these settings, most with others that go other ways through the engine."""

BESIDE = (("bf16",),)
"""What the host trains with besides: slices of 16 bits that graphs gather, which stage 2 does not."""

ALONE = (("bf16", "offloaded"), ("autocast", "checkpointed"), ("lengths", "accumulated locally"))
"""What one rank alone trains with, where all units are resident and nothing travels."""


def same_bits_body(context: Context) -> dict[str, bool]:
    """Where placement is measured the kernels of host and device may take turns at other units. A device may
    have other backwards under autocast in graphs than in eager torch, without an engine too."""
    near = {"placed by measurement": STEPS}  # losses to compare
    groups: Sequence[Sequence[str]] = ALONE if context.size == 1 else (*TOGETHER, *BESIDE)
    if context.accelerator.device.type != "cpu":
        near["autocast"], groups = 1, TOGETHER
    found = {}
    for names in groups:
        settings = {key: value for name in names for key, value in SAME_BITS[name].items()}
        compiled, eager = train(context, AOT, **settings), train(context, None, **settings)
        name, count = " and ".join(names), min((near[name] for name in names if name in near), default=0)
        if count:
            found[name] = relative_error(compiled.losses[:count], eager.losses[:count]) < 1e-5
        else:
            found[name] = same_bits(compiled, eager)
    return found


@pytest.mark.parametrize("size", UP_TO_TWO)
def test_the_bits_of_eager_training(cluster: Clusters, size: int) -> None:
    """aot_eager runs the eager engine's operations, so every loss and weight is the same."""
    assert sorted(name for names in TOGETHER for name in names) == sorted(SAME_BITS)
    for found in cluster(size).run(same_bits_body, limit=280):
        assert all(found.values()), found


def small_model_body(context: Context) -> tuple[bool, float, float]:
    """Ties, frozen parts, a block used twice, odd strides, parameters with no or one element."""

    def loss(model: nn.Module, step: int, rank: int) -> Tensor:
        return model(small_tokens(step, rank, model))["loss"]

    runs = []
    for compile in (None, AOT):
        torch.manual_seed(3)
        runs.append(train_zero(context, LanguageModel(), loss, zero.Config(compile=compile), adamw, STEPS))
    part = [train(context, compile, part_loss) for compile in (None, AOT)]
    clipped = [train(context, compile, clip_norm=0.1) for compile in (None, AOT)]
    errors = (relative_error(b.losses, a.losses) for a, b in (part, clipped))
    return (same_bits(*runs), *errors)


def test_odd_parameters_parts_called_alone_and_clipping(cluster: Clusters) -> None:
    for same, part, clipped in cluster(2).run(small_model_body, limit=120):
        assert same
        assert part < 1e-5  # a gradient that comes from two graphs is reduced in two parts
        assert clipped < 1e-5  # the norm is summed in the order of other units


BROKEN = ("broken", "broken checkpointed", "broken root")


def breaks_body(context: Context) -> dict[str, Any]:
    found = {}
    for path in BROKEN if context.size > 1 else BROKEN[:1]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            compiled = train(context, AOT, path=path)
        told = [str(w.message) for w in caught if "unit by unit" in str(w.message)]
        where = sum('models.py", line ' in message for message in told)
        found[path] = (same_bits(compiled, train(context, None, path=path)), len(told), where)
    return found


@pytest.mark.parametrize("size", UP_TO_TWO)
def test_graph_breaks_go_unit_by_unit(cluster: Clusters, size: int) -> None:
    for rank, found in enumerate(cluster(size).run(breaks_body, limit=120)):
        told = int(rank == 0)
        assert found == dict.fromkeys(BROKEN if size > 1 else BROKEN[:1], (True, told, told))


class Recomputed(nn.Module):
    """A chain with a graph break that notes which of its parts are compiled when it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.compiled: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        self.compiled.append(all("forward" in block.__dict__ for block in self.blocks))
        for block in self.blocks:
            x = block(x)
        return x


def recomputed_body(context: Context) -> list[bool]:
    model = Recomputed()
    engine = zero.initialize(model, adamw(model), zero.Config(compile=AOT))
    for step in range(3):
        x = torch.full((2, 8), 1.0 + step, device=engine.accelerator.device, requires_grad=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            engine.backward(checkpoint(model, x, use_reentrant=True).square().mean())
        engine.step()
    return model.compiled


@pytest.mark.host
def test_what_a_checkpoint_recomputes_runs_as_it_did(cluster: Clusters) -> None:
    """Units are compiled when no backward may recompute what ran without."""
    for compiled in cluster(1).run(recomputed_body):
        assert compiled == [False, False, True, True, True, True]


class Returning(nn.Module):
    """A network whose loss, computed outside, multiplies with the weight of its head."""

    def __init__(self, view: bool) -> None:
        super().__init__()
        self.body = nn.Linear(32, 32)
        self.head = nn.Linear(32, 40, bias=False)
        self.view = view

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.body(x).tanh(), self.head.weight.t() if self.view else self.head.weight


def returned_loss(model: nn.Module, step: int, rank: int) -> Tensor:
    x = torch.full((4, 32), 0.1 * (step + rank + 1), device=device_of(model))
    with torch.no_grad():
        values, weight = model(x)
        assert weight.square().sum() > 0
    values, weight = model(x)
    return (values @ weight.reshape(32, 40)).square().mean()


def returned_body(context: Context) -> dict[bool, bool]:
    found = {}
    for view in (False, True):
        runs = []
        for compile in (None, AOT):
            torch.manual_seed(3)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "zero: the model is compiled unit by unit")
                config = zero.Config(compile=compile, timeout=20)
                runs.append(train_zero(context, Returning(view), returned_loss, config, adamw, STEPS))
        found[view] = same_bits(*runs)
    return found


def test_parameters_that_the_model_returns_have_values(cluster: Clusters) -> None:
    for found in cluster(2).run(returned_body):
        assert found == {False: True, True: True}


class Routed(nn.Module):
    """Experts, each called with the rows that are routed to it if there are any."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(32, 3)
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        result = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (weights.argmax(-1) == index).nonzero().flatten()
            if rows.numel() > 0:
                result = result.index_add(0, rows, expert(x[rows]) * weights[rows, index, None])
        return result


class Looking(nn.Module):
    """A unit that looks at its whole weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        with zero.gathered(self.layer.weight):
            size = self.layer.weight.detach().abs().mean().item()
        return x / size


def rows_loss(model: nn.Module, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return model(torch.randn(6, 32, generator=generator).to(device_of(model))).square().mean()


def untraced_body(context: Context) -> dict[str, tuple[bool, int]]:
    found = {}
    for kind, units in ((Routed, "auto"), (Looking, [Looking])):
        runs = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for compile in (None, AOT):
                torch.manual_seed(3)
                model = nn.Sequential(nn.Linear(32, 32), kind(), nn.Linear(32, 32), kind())
                config = zero.Config(compile=compile, units=units, timeout=20)  # type: ignore[arg-type]
                runs.append(train_zero(context, model, rows_loss, config, adamw, STEPS))
        told = sum("unit by unit" in str(warning.message) for warning in caught)
        found[kind.__name__] = (same_bits(*runs), told)
    return found


@pytest.mark.host
def test_what_depends_on_values_goes_unit_by_unit(cluster: Clusters) -> None:
    for rank, found in enumerate(cluster(2).run(untraced_body)):
        assert found == {"Routed": (True, rank == 0), "Looking": (True, rank == 0)}


class Dropped(nn.Module):
    """A chain with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.nn.functional.dropout(block(x).tanh(), 0.3)
        return x.square().mean()


def twice_recomputed_loss(model: nn.Module, step: int, rank: int, reentrant: bool) -> Tensor:
    """Two calls of the whole model are recomputed, and a third is not."""
    x = torch.full((4, 32), 0.1 * (step + rank + 1), device=device_of(model), requires_grad=True)
    first, second = (checkpoint(model, part, use_reentrant=reentrant) for part in (x, 2 * x))
    return first + second + model(x)


def recomputed_whole_body(context: Context) -> list[float]:
    errors = []
    for reentrant in (True, False):
        runs = []
        for compile in (None, AOT):
            torch.manual_seed(3)
            loss = partial(twice_recomputed_loss, reentrant=reentrant)
            config = zero.Config(compile=compile, timeout=20)
            runs.append(train_zero(context, Dropped(), loss, config, adamw, STEPS))
        errors.append(relative_error(runs[1].losses, runs[0].losses))
    return errors


def test_the_whole_model_may_be_recomputed(cluster: Clusters) -> None:
    for errors in cluster(2).run(recomputed_whole_body):
        assert max(errors) < 1e-5  # the order in which gradients of three graphs are added up


def compiled_outside_body(context: Context) -> dict[str, Any]:
    """The loss in a function that the program compiles itself, and the model in it by the engine, or not."""
    found = {}
    for compile in (None, AOT):
        model = fresh()
        engine = zero.initialize(model, adamw(model), zero.Config(compile=compile, timeout=20))
        doubled = torch.compile(lambda given, model=model: 2 * model(given), backend="aot_eager")
        losses = []
        for step in range(STEPS):
            loss = doubled(tokens(step, context.rank, model))
            train_on(engine, loss)
            losses.append(loss.item())
        found["compiled" if compile else "eager"] = losses
    return found | {"mode": engine.explain().mode}


@pytest.mark.host
def test_programs_compile_what_is_around_the_model(cluster: Clusters) -> None:
    for found in cluster(2).run(compiled_outside_body):
        assert found["compiled"] == found["eager"]
        assert found["mode"] == "graph"
