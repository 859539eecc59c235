"""What AOTAutograd cannot trace trains as the compiler's absence would have it, and says so once."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.compiled_models import WIDTH
from tests.zero.helpers.loops import train_on
from tests.zero.helpers.models import device_of
from tests.zero.helpers.training import adamw
from tests.zero.helpers.wrappers import Codes, Wrapping

pytestmark = pytest.mark.slow  # compiles


@torch.library.custom_op("zero_tests::untraceable", mutates_args=())
def untraceable(x: Tensor) -> Tensor:
    """A copy of `x` whose backward reads values, which a tracer does not have."""
    return x.clone()


def read_values(context: object, gradient: Tensor) -> Tensor:
    gradient.detach().cpu().numpy()
    return gradient * 2


untraceable.register_fake(torch.empty_like)
untraceable.register_autograd(read_values)


class Untraceable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = untraceable(layer(x))
        return x.square().mean()


def losses_of(context: Context, compile: zero.Compile | None) -> tuple[list[float], str]:
    torch.manual_seed(3)
    model = Untraceable()
    engine = zero.initialize(
        model, adamw(model), zero.Config(compile=compile, units=(nn.Linear,), timeout=60)
    )
    losses = []
    for step in range(3):
        loss = engine(torch.full((2, WIDTH), 0.1 * (step + 1 + context.rank), device=device_of(model)))
        train_on(engine, loss)
        losses.append(loss.item())
    return losses, "" if compile is None else engine.explain().mode


def untraceable_body(context: Context, inner: str) -> tuple[bool, str, int]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses, mode = losses_of(context, zero.Compile(inner=inner))
    expected, _ = losses_of(context, None)
    return losses == expected, mode, sum("one graph" in str(each.message) for each in caught)


def test_what_cannot_be_traced_runs_by_units(cluster: Clusters, device: str) -> None:
    inner = "inductor" if device == "cpu" else "aot_eager"  # its C++ compiler generates code for the host
    first, second = cluster(2).run(untraceable_body, inner=inner, limit=120)
    assert first == (True, "units", 1)
    assert second == (True, "units", 0), "rank 0 warns for all"


def packed_body(context: Context) -> list[str]:
    """Frozen weights in codes, which the hooks of units gather, and one graph could not."""
    found: list[list[float]] = []
    for compile in (None, zero.Compile(inner="aot_eager", persist_budget="1MiB")):
        torch.manual_seed(3)
        model = nn.Sequential(*(Wrapping(WIDTH, Codes) for _ in range(2))).to(context.accelerator.device)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine = zero.initialize(model, adamw(model), zero.Config(compile=compile, timeout=60))
        found.append([])
        for _ in range(2):
            loss = engine(torch.full((2, WIDTH), 0.1, device=device_of(model))).square().mean()
            train_on(engine, loss)
            found[-1].append(loss.item())
    assert found[0] == found[1]
    assert engine.explain().mode == "units"
    assert engine.explain().why.endswith("could not gather: 0.weight, 1.weight")
    return [told for each in caught if "one graph" in (told := str(each.message))]


def test_models_with_weights_in_codes_are_compiled_by_units(cluster: Clusters) -> None:
    (told,), other = cluster(2).run(packed_body)
    assert "compiled unit by unit, because it is not one graph: parameters have their values in" in told
    assert told.endswith("No unit persists")
    assert not other, "rank 0 warns for all"
