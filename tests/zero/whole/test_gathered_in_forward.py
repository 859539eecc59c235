"""zero.gathered inside a forward, which continues with written values and keeps those it computed with."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.simulated import faults_of
from tests.zero.helpers.loops import train_on
from tests.zero.helpers.training import adamw
from zero.whole.full_parameters import FullParameters

WIDTH = 16
WAYS = [(None, False), (None, True), ("int8", False), ("int8", True)]


def build(model: nn.Module, unit: str, gather_dtype: Any) -> zero.Engine:
    config = zero.Config(gather_dtype=gather_dtype, units=(unit,), prefetch=0, timeout=20)
    return zero.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), config)


def ones(engine: zero.Engine) -> Tensor:
    return torch.ones(2, WIDTH, device=engine.accelerator.device)


@contextmanager
def _slow_to_write(slow: bool) -> Iterator[None]:
    assign = FullParameters.assign

    def late(*arguments: Any) -> None:
        time.sleep(0.2)
        assign(*arguments)

    with patch.object(FullParameters, "assign", late if slow else assign):
        yield


def writing_body(context: Context, gather_dtype: Any, autocast: bool) -> float:
    """The distance of a forward's result from what the values that its pre-hook wrote would give."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    engine, far = build(model, "Linear", gather_dtype), []

    def write(module: nn.Linear, _: Any) -> None:
        with zero.gathered(module, write_rank=0), torch.no_grad():
            module.weight.fill_(0.5)
            module.bias.fill_(0.25)

    def compare(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        expected = inputs[0].float().sum(1, keepdim=True) * 0.5 + 0.25
        far.append((output.float() - expected).abs().max().item())

    model[1].register_forward_pre_hook(write)
    model[1].register_forward_hook(compare)
    x = ones(engine)
    with _slow_to_write(context.rank == 1), torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
        engine(x)
    return far[0]


@pytest.mark.parametrize(("gather_dtype", "autocast"), WAYS)
def test_a_forward_goes_on_with_what_was_written(
    cluster: Clusters, gather_dtype: Any, autocast: bool
) -> None:
    for far in cluster(2).run(writing_body, gather_dtype=gather_dtype, autocast=autocast):
        assert far < (2e-2 if autocast else 1e-5)


class Inner(nn.Module):
    """A module that itself gathers a weight which has been gathered for it already."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH) * 1.3)

    def forward(self, x: Tensor) -> Tensor:
        with zero.gathered(self.weight), torch.autocast(x.device.type, enabled=False):
            return functional.linear(x.float(), self.weight).tanh()


def computing_body(context: Context, gather_dtype: Any, autocast: bool) -> bool:
    model = nn.Sequential(Inner(), Inner())
    plain = nn.Sequential(Inner(), Inner())
    engine = build(model, "Inner", gather_dtype)
    x = ones(engine)
    with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
        engine.backward(engine(x).sum())
    value = x.cpu()
    for layer in plain:
        value = functional.linear(value, layer.weight).tanh()
    value.sum().backward()
    gradients = {name: engine.full_gradient(name) for name, _ in plain.named_parameters()}
    return all(
        torch.allclose(gradients[name].cpu(), parameter.grad, rtol=2e-2 if autocast else 1e-4, atol=1e-3)
        for name, parameter in plain.named_parameters()
    )


@pytest.mark.parametrize(("gather_dtype", "autocast"), WAYS)
def test_what_is_shown_may_be_computed_with(cluster: Clusters, gather_dtype: Any, autocast: bool) -> None:
    assert all(cluster(2).run(computing_body, gather_dtype=gather_dtype, autocast=autocast))


class Twice(nn.Module):
    """A block called twice: with an input that tells when its backward ends, and in a reentrant checkpoint,
    without such an input."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.block = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(checkpoint(self.block, self.first(x), use_reentrant=True))


def twice_body(context: Context, gather_dtype: Any, autocast: bool) -> bool:
    model = Twice()
    engine = build(model, "Sequential", gather_dtype)
    x = ones(engine)
    for _ in range(2):
        with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
            loss = engine(x).float().square().mean()
        train_on(engine, loss)
    return all(unit.idle for unit in engine.units)


@pytest.mark.parametrize(("gather_dtype", "autocast"), WAYS)
def test_a_block_in_a_reentrant_checkpoint_and_out_of_it(
    cluster: Clusters, gather_dtype: Any, autocast: bool
) -> None:
    assert all(cluster(2).run(twice_body, gather_dtype=gather_dtype, autocast=autocast))


def half_body(context: Context, gather_dtype: Any, autocast: bool) -> list[str]:
    """A gather that runs out of memory half-way, in a block that holds the unit, and is tried again."""
    wrong = []
    for nth in range(1, 9):
        engine = build(nn.Sequential(nn.Linear(WIDTH, WIDTH)), "Linear", gather_dtype)
        x = ones(engine)

        def forward(engine: zero.Engine = engine, x: Tensor = x) -> Tensor:
            with torch.no_grad(), torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
                return engine(x).float().cpu()

        with zero.gathered(engine.module):
            expected = forward()
        with zero.gathered(engine.module):
            try:
                with faults_of(context.accelerator).out_of_memory(nth):
                    forward()
            except torch.OutOfMemoryError:
                pass
            try:
                if not torch.equal(forward(), expected):
                    wrong.append(f"{nth}: other values")
            except RuntimeError as error:
                wrong.append(f"{nth}: {error}")
    return wrong


@pytest.mark.parametrize(("gather_dtype", "autocast"), WAYS)
@pytest.mark.usefixtures("simulated")
def test_half_a_gather_is_finished_by_the_next(cluster: Clusters, gather_dtype: Any, autocast: bool) -> None:
    for wrong in cluster(2).run(half_body, gather_dtype=gather_dtype, autocast=autocast):
        assert wrong == []


def nested_body(context: Context, stage: int) -> list[float]:
    """A block that writes, inside one that reads; a change after it is still told."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    engine = zero.initialize(model, adamw(model), zero.Config(stage=stage, timeout=20))  # type: ignore[arg-type]
    weight = model[0].weight
    with zero.gathered(model), torch.no_grad():
        with zero.gathered(weight, write_rank=0):
            if context.rank == 0:
                weight.fill_(4.0)
        inside = float(weight.sum())
    with zero.gathered(weight):
        after = float(weight.sum())
    with pytest.raises(zero.UsageError, match="was changed inside"):
        change_twice(engine.module, weight)
    return [inside, after]


@torch.no_grad()
def change_twice(model: nn.Module, weight: nn.Parameter) -> None:
    with zero.gathered(model):
        with zero.gathered(weight, write_rank=0):
            weight.fill_(5.0)
        weight.fill_(6.0)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_block_that_writes_inside_one_that_reads(cluster: Clusters, stage: int) -> None:
    assert cluster(2).run(nested_body, stage=stage) == [[64.0, 64.0]] * 2
