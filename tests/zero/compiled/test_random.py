"""Random operations in graphs: what is recomputed in the backward draws the numbers of the forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch._functorch._aot_autograd import utils as aot_utils
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zero
from accelz import HOST
from accelz.conformance.cluster import Clusters, Context
from tests.zero.conftest import Abilities
from tests.zero.helpers.loops import train_on
from tests.zero.helpers.training import adamw

WIDTH, STEPS = 32, 4


class Dropping(nn.Module):
    """Blocks with dropout, each recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(), nn.Linear(WIDTH, WIDTH))
            for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, 300)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return F.mse_loss(self.head(x), torch.ones(300, device=x.device))


@contextmanager
def states_in_graphs(device_type: str) -> Iterator[None]:
    """Have graphs take the states of generators as inputs, as on CUDA; the host has none to take."""
    if device_type == HOST.type or aot_utils.supports_graphsafe_rng(torch.device(device_type)):
        yield
        return
    aot_utils.register_graphsafe_rng_device_type(device_type)
    try:
        yield
    finally:
        aot_utils._GRAPHSAFE_RNG_DEVICE_TYPES.discard(device_type)


@pytest.fixture
def graphs_take_states(abilities: Abilities) -> None:
    if not abilities.capabilities.compiles("aot_eager"):
        pytest.skip("needs a device that torch.compile does something for")
    if abilities.apart and not hasattr(aot_utils, "register_graphsafe_rng_device_type"):
        pytest.skip("torch 2.11 gives no device but CUDA generators whose states are inputs of graphs")


def losses(context: Context, stage: int | None) -> list[float]:
    """Of an engine's training; without a stage, of torch.compile alone."""
    torch._dynamo.reset()
    torch.manual_seed(3)
    model, device = Dropping(), context.accelerator.device
    if stage is None:
        model.to(device)
        optimizer = adamw(model)
        call = torch.compile(model, backend="aot_eager")
    else:
        config = zero.Config(stage=stage, compile=zero.Compile(inner="aot_eager"), timeout=20)  # type: ignore[arg-type]
        call = engine = zero.initialize(model, adamw(model), config)
    torch.manual_seed(5 + context.rank)
    found = []
    for step in range(STEPS):
        loss = call(torch.full((4, WIDTH), 0.1 * (step + context.rank + 1), device=device))
        if stage is None:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            train_on(engine, loss)
        found.append(loss.item())
    return found


def body(context: Context, stages: tuple[int | None, ...]) -> list[list[float]]:
    with states_in_graphs(context.accelerator.device.type):
        return [losses(context, stage) for stage in stages]


@pytest.mark.usefixtures("graphs_take_states")
def test_a_graph_draws_what_torch_compile_draws(cluster: Clusters) -> None:
    ((plain, sharded),) = cluster(1).run(body, stages=(None, 3), limit=120)
    assert all(abs(a - b) <= 1e-5 * abs(a) for a, b in zip(plain, sharded, strict=True))


@pytest.mark.usefixtures("graphs_take_states")
def test_stages_draw_the_same(cluster: Clusters) -> None:
    ranks = cluster(2).run(body, stages=(0, 3), limit=120)
    assert all(whole == sharded for whole, sharded in ranks)
    assert ranks[0] != ranks[1]


def whole_body(context: Context) -> list[list[float]]:
    """The gradient of generated code, which draws numbers of its own, without and with recomputation."""
    found = []
    for recompute in (lambda model, x: model(x), partial(checkpoint, use_reentrant=True)):
        torch._dynamo.reset()
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(), nn.Linear(WIDTH, 1))
        engine = zero.initialize(model, adamw(model), zero.Config(compile=True, timeout=20))
        torch.manual_seed(5)
        x = torch.full((4, WIDTH), 0.1, device=context.accelerator.device, requires_grad=True)
        engine.backward(recompute(model, x).square().mean())
        gradient = engine.full_gradient("0.weight")
        assert gradient is not None
        found.append(gradient.flatten().tolist())
    return found


@pytest.mark.usefixtures("generates_code")
def test_a_model_that_is_recomputed_whole_draws_the_same(cluster: Clusters) -> None:
    ((straight, recomputed),) = cluster(1).run(whole_body, limit=120)
    assert straight == recomputed
