"""What the compiler makes of the model on one rank alone, and what all are told of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import zero
from accelz.conformance.cluster import Cluster, Clusters, Context
from tests.zero.helpers.compiled_models import WIDTH
from tests.zero.helpers.models import device_of
from tests.zero.helpers.own_bytes import bytes_of_its_own
from tests.zero.helpers.training import adamw

BY_UNITS = "the model is compiled unit by unit, because it is not one graph"


class Chain(nn.Module):
    """Calls its layers in another order than the one in which a graph would gather them if it is broken."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.broken = broken

    def forward(self, x: Tensor) -> Tensor:
        if self.broken:
            torch._dynamo.graph_break()
        for layer in reversed(self.layers) if self.broken else self.layers:
            x = layer(x)
        return x.square().mean()


def engine_of(broken: bool, inner: Any) -> zero.Engine:
    torch.manual_seed(3)
    model = Chain(broken)
    config = zero.Config(compile=zero.Compile(inner=inner), units=(nn.Linear,), timeout=20)
    return zero.initialize(model, adamw(model), config)


def batch(engine: zero.Engine) -> Tensor:
    return torch.ones(4, WIDTH, device=device_of(engine.module))


def by_units_body(context: Context) -> str:
    engine = engine_of(context.rank == 1, "aot_eager")
    with pytest.raises(zero.CommunicationError) as told:
        engine.backward(engine(batch(engine)))
    return str(told.value)


@pytest.mark.host
def test_the_rank_whose_model_is_no_graph_is_named(disposable: Callable[[int], Cluster]) -> None:
    """Its order of gathers is another one: every rank's error says why."""
    for told in disposable(2).run(by_units_body, limit=120):
        assert f"On rank(s) 1, {BY_UNITS}: " in told


def not_generated_body(context: Context) -> list[str]:
    no_compiler = {"cpp.cxx": ("no-such-compiler",), "force_disable_caches": True}
    engine = engine_of(False, "inductor")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with inductor_config.patch(no_compiler if context.rank == 1 else {}):
                engine.backward(engine(batch(engine)))
            engine.step()
    assert bool(engine.explain().not_generated) == (context.rank == 1)
    return [str(each.message) for each in caught if "inductor" in str(each.message)]


def test_rank_0_warns_of_what_is_not_generated_elsewhere(cluster: Clusters, device: str) -> None:
    if device != "cpu":
        pytest.skip("the C++ compiler generates code for the host")
    (told,), nothing = cluster(2).run(not_generated_body, limit=280)
    assert told.startswith("zero: on rank(s) 1, inductor could not compile a graph of the model")
    assert nothing == []


class Operations(TorchDispatchMode):
    """Collects the names of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    """Refuses to make tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (torch.empty, torch.zeros, torch.tensor), f"the engine calls {func.__name__}"
        return func(*args, **(kwargs or {}))


MODES: tuple[type[AbstractContextManager[Any]], ...] = (nullcontext, Operations, Functions)


def modes_body(context: Context) -> list[float]:
    """Losses of training with a mode of the program's around the backwards."""
    found = []
    for mode in MODES:
        with bytes_of_its_own(context.accelerator):
            engine = engine_of(False, "aot_eager")
        for _ in range(3):
            loss = engine(batch(engine))
            with mode() as switched_on:
                engine.backward(loss)
            if isinstance(switched_on, Operations):
                assert not {"empty", "set_data", "copy_"} & switched_on.seen, switched_on.seen
            engine.step()
        found.append(loss.item())
    return found


def test_modes_around_a_backward_do_not_see_the_engines_work(cluster: Clusters) -> None:
    for plain, *others in cluster(2).run(modes_body, limit=120):
        assert others == [plain] * len(others)
