"""torch's schedules without bubbles, with stages that compute gradients of weights later than of inputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.meshes import mesh_of
from tests.zero.helpers.pipelines import (
    CLIP,
    LAYERS,
    MICRO_BATCHES,
    RANKS,
    ROWS,
    STEPS,
    WIDTH,
    Part,
    loss_of,
    numbers_of,
    reference,
    rows,
)
from tests.zero.helpers.training import relative_error, state_error

pytestmark = pytest.mark.host  # torch sends activations from stage to stage

Later = list[tuple[tuple[Tensor, Tensor], Tensor, Tensor]]
"""Weight and bias of a layer, and what their gradients are made of: its input and its output's gradient."""


class _Now(torch.autograd.Function):
    """A layer whose backward gives the gradient of its input alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, later: Later) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parameters, ctx.later = (weight, bias), later
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        ctx.later.append((ctx.parameters, x, gradient))
        return gradient @ weight, None, None, None


class _Late(torch.autograd.Function):
    """Its backward gives the gradients of weight and bias."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, bias: Tensor, x: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(x, gradient)
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, one: Tensor) -> Any:  # type: ignore[override]
        x, gradient = ctx.saved_tensors
        return gradient.T @ x, gradient.sum(0), None, None


class Delaying(nn.Linear):
    def __init__(self, later: Later) -> None:
        super().__init__(WIDTH, WIDTH)
        self.later = later

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = _Now.apply(x, self.weight, self.bias, self.later)  # type: ignore[no-untyped-call]
        return found


def builder_of(later: Later, order: list[str]) -> Callable[[], Callable[[], None]]:
    """A `dw_builder` of a stage: torch calls it after a micro-batch's backward, and the result later."""

    def build() -> Callable[[], None]:
        mine = later[-1:]  # without those of a backward that torch has run to learn the shapes
        later.clear()
        order.append("B")
        return partial(run, mine)

    def run(mine: Later) -> None:
        order.append("W")
        torch.autograd.backward([_Late.apply(*parameters, x, g) for parameters, x, g in mine])  # type: ignore[no-untyped-call]

    return build


def delaying(number: int, later: Later) -> Part:
    part = Part(number, 1)
    made = Delaying(later)
    made.load_state_dict(part.layers[str(number)].state_dict())
    part.layers[str(number)] = made
    return part


def body(context: Context) -> dict[str, tuple[dict[str, float], str, int]]:
    losses, norms, weights = reference()
    mesh = mesh_of(("pp", 2), ("dp", 2))
    number, place = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    found = {}
    for kind, stage in ((ScheduleInterleavedZeroBubble, 1), (ScheduleZBVZeroBubble, 3)):
        order: list[str] = []
        numbers = numbers_of(kind, number)
        queues: list[Later] = [[] for _ in numbers]
        parts = [delaying(n, later) for n, later in zip(numbers, queues, strict=True)]
        optimizer = torch.optim.SGD(
            [p for part in parts for p in part.parameters()], lr=0.05, momentum=0.9, nesterov=True
        )
        config = zero.Config(stage=stage, timeout=20, clip_norm=CLIP, local_modules={"*": "pp"})
        engine = zero.initialize(parts, optimizer, config, mesh=mesh, data_dims="dp")
        stages = [
            PipelineStage(
                part,
                n,
                LAYERS,
                torch.device("cpu"),
                group=mesh.get_group("pp"),
                dw_builder=builder_of(later, order),
            )
            for part, n, later in zip(parts, numbers, queues, strict=True)
        ]
        schedule = kind(stages, MICRO_BATCHES, loss_fn=loss_of)
        told, seen = [], []
        for step in range(STEPS):
            engine.traffic.clear()
            said: list[Tensor] = []
            given = (rows(step, place),) if number == 0 else ()
            ends = {"target": torch.ones(ROWS, WIDTH), "losses": said} if LAYERS - 1 in numbers else {}
            schedule.step(*given, **ends)
            optimizer.step()
            seen.append(float(engine.grad_norm or 0))
            optimizer.zero_grad()
            told += [torch.stack(said).mean().item()] if said else []
        state = {key.split(".", 1)[1]: v for key, v in engine.state_dict().items()}
        found[kind.__name__] = (
            {
                "norms": relative_error(seen, norms),
                "losses": relative_error(told, [each[place] for each in losses]) if told else 0.0,
                "weights": state_error(state, {key: weights[key] for key in state}),
            },
            "".join(order[-2 * len(parts) * MICRO_BATCHES :]),
            engine.traffic.calls["reduce_scatter"],
        )
    return found


def test_weights_may_come_later(cluster: Clusters) -> None:
    """And nothing is reduced before: each gradient of weights is, with what there is of the other part."""
    every = cluster(RANKS).run(body, limit=60)
    for found in every:
        for errors, order, reduced in found.values():
            assert max(errors.values()) < 1e-6, found
            assert order.count("B") == order.count("W") == 2 * MICRO_BATCHES
            assert reduced == 2 * order.count("W")
    for kind in every[0]:
        assert any("BB" in found[kind][1] for found in every), "none has come later"
