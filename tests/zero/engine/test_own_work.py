"""The engine's own tensors are no part of what a program has switched on around a forward or backward."""

from __future__ import annotations

import copy
import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import grad, jacfwd, jvp, linearize, vjp, vmap
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import zero
from accelz import Accelerator
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.loops import train_on
from tests.zero.helpers.training import adamw
from tests.zero.helpers.ways import WIDTH, averaged, batch, chain, plain


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH + 3), nn.Linear(WIDTH + 3, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def flow(model: nn.Module, x: Tensor) -> Tensor:
    """As MeanFlow (arXiv:2505.13447): a derivative along a direction is part of the target."""
    value, along = jvp(model, (x,), (torch.ones_like(x),))
    return (value - (x - along).detach()).square().mean()


def along(model: nn.Module, x: Tensor) -> Tensor:
    return jvp(model, (x,), (torch.ones_like(x),))[1].square().mean()


def dual(model: nn.Module, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        value = model(forward_ad.make_dual(x, torch.ones_like(x)))
        return forward_ad.unpack_dual(value).tangent.square().mean()


def target(function: Callable[[nn.Module, Tensor], Tensor], model: nn.Module, x: Tensor) -> Tensor:
    """What a transform computes without gradients is the target of a common forward."""
    with torch.no_grad():
        wanted = function(model, x)
    return (model(x) - wanted).square().mean()


def energy(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum()


def penalty(model: nn.Module, x: Tensor) -> Tensor:
    value, pull = vjp(model, x)
    (gradient,) = pull(torch.ones_like(value))
    return value.square().mean() + gradient.square().mean()


TRANSFORMS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "jvp": flow,
    "jvp, tangent alone": along,
    "dual numbers": dual,
    "vmap": lambda model, x: (vmap(model)(x) - x).square().mean(),
    "vjp": penalty,
    "grad of grad": lambda model, x: jvp(grad(lambda y: energy(model, y)), (x,), (x,))[1].square().mean(),
    "target of jvp": functools.partial(target, lambda model, x: jvp(model, (x,), (x,))[1]),
    "target of jacfwd": functools.partial(
        target, lambda model, x: jacfwd(lambda y: model(y).sum(0))(x)[0, 0]
    ),
    "target of vmap of grad": functools.partial(
        target, lambda model, x: vmap(grad(lambda y: model(y[None]).sum()))(x)
    ),
}


@contextmanager
def memory_of_its_own(accelerator: Accelerator) -> Iterator[None]:
    """Have units released that would stay where ranks share memory."""
    strategy: Any = accelerator.flat_buffers
    strategy.share = lambda buffer, group: None
    try:
        yield
    finally:
        del strategy.share


def transform_body(context: Context, settings: dict[str, Any]) -> dict[str, float]:
    found = {}
    for name, loss in TRANSFORMS.items():
        torch.manual_seed(3)
        model, device = chain(Residual), context.accelerator.device
        expected = averaged(copy.deepcopy(model).to(device), loss, context.size)
        with memory_of_its_own(context.accelerator):
            config = zero.Config(timeout=20, **settings)
            engine = zero.initialize(model, torch.optim.SGD(model.parameters(), lr=0.0), config)
        worst = 0.0
        for _ in range(2):
            engine.backward(loss(engine.module, batch(context.rank, device)))
            for parameter, value in expected.items():
                have = engine.full_gradient(parameter)
                if value is not None:
                    assert have is not None, (name, parameter)
                    worst = max(worst, float((have - value).abs().max()))
            engine.step()
            assert all(unit.idle or unit.resident for unit in engine.units), name
        found[name] = worst
    return found


@pytest.mark.parametrize(
    "way", [*(pytest.param(way, marks=pytest.mark.host) for way in ("2", "on demand")), "3", "on disk"]
)
def test_transforms_and_forward_mode(cluster: Clusters, way: str, tmp_path: Path) -> None:
    settings: dict[str, dict[str, Any]] = {
        "2": {"stage": 2},
        "3": {"stage": 3},
        "on demand": {"prefetch": 0},
        "on disk": {"offload": zero.Offload(params="disk", optimizer="disk", path=str(tmp_path))},
    }
    for found in cluster(2).run(transform_body, settings=settings[way], limit=120):
        assert max(found.values()) < 1e-5, found


def cast_body(context: Context, settings: dict[str, Any], autocast: bool) -> list[float]:
    """Gathers that make values anew, inside transforms."""
    torch.manual_seed(3)
    model, device = chain(Residual), context.accelerator.device
    with memory_of_its_own(context.accelerator):
        config = zero.Config(timeout=20, **settings)
        engine = zero.initialize(model, torch.optim.SGD(model.parameters(), lr=0.5), config)
    x, losses = batch(context.rank, device), []
    for _ in range(4):
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            loss = target(TRANSFORMS["jvp"], model, x) + flow(model, x)
        train_on(engine, loss.float())
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("way", ["int8", "autocast"])
def test_transforms_of_gathers_that_convert(cluster: Clusters, way: str) -> None:
    settings = {"gather_dtype": "int8"} if way == "int8" else {}
    for losses in cluster(2).run(cast_body, settings=settings, autocast=way == "autocast"):
        assert losses == sorted(losses, reverse=True)


def linearize_body(context: Context) -> bool:
    model, x = chain(Residual), batch(context.rank, context.accelerator.device)
    engine = zero.initialize(model, adamw(model), zero.Config(timeout=20))
    with torch.no_grad():
        with zero.gathered(engine.module):
            _, function = linearize(model, x)
            found, expected = function(x), jvp(model, (x,), (x,))[1]
        with pytest.raises(
            zero.ShardedParameterError, match=r"what they return, inside `with zero\.gathered"
        ):
            linearize(model, x)[1](x)
    return torch.allclose(found, expected, atol=1e-5)


def test_what_linearize_needs_is_said(cluster: Clusters) -> None:
    assert cluster(2).run(linearize_body) == [True, True]


class Recomputed(nn.Module):
    """Recomputes its blocks selectively. saved: of which operations the results are kept."""

    def __init__(self, saved: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual() for _ in range(3))
        self.saved = saved

    def policy(self, context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = self.saved == "all" or operation.overloadpacket.__name__ == self.saved
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    def forward(self, x: Tensor) -> Tensor:
        contexts = functools.partial(create_selective_checkpoint_contexts, self.policy)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        return x


class Operations(TorchDispatchMode):
    """Collects the names of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))

    def made(self) -> list[str]:
        """Those that make a tensor of nothing, or give one other data."""
        return [name for name in self.seen if name in ("empty", "set_data", "ones")]


class Functions(TorchFunctionMode):
    """Refuses to make tensors: the model and its loss make none, but for torch 2.11's own recomputing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        of_torch = sys._getframe(1).f_code.co_filename == torch.utils.checkpoint.__file__
        if func in (torch.empty, torch.zeros, torch.tensor) and not of_torch:
            raise AssertionError(f"the engine calls {func.__name__} in a mode of the program's")
        return func(*args, **(kwargs or {}))


CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "none": nullcontext,
    "dispatch mode": Operations,
    "function mode": Functions,
    "default device": lambda: torch.device("meta"),
    "anomaly": lambda: torch.autograd.detect_anomaly(check_nan=True),
}


def contexts_body(context: Context, saved: str) -> dict[str, float]:
    found = {}
    warnings.simplefilter("error", UserWarning)  # torch warns of exceptions in hooks that it silences
    warnings.filterwarnings("ignore", "Anomaly Detection has been enabled")
    warnings.filterwarnings("ignore", "Set seed for")  # torch, of a device that it cannot seed
    warnings.filterwarnings("ignore", ".* does not declare storage_resize")
    device = context.accelerator.device
    unsharded = Recomputed(saved).to(device)
    with Operations() as alone:  # in torch 2.11, recomputing makes tensors of its own
        plain(unsharded, batch(context.rank, device)).backward()
    for name, switched_on in CONTEXTS.items():
        torch.manual_seed(5)
        model = Recomputed(saved)
        expected = averaged(copy.deepcopy(model).to(device), plain, context.size)
        with memory_of_its_own(context.accelerator):
            engine = zero.initialize(
                model, torch.optim.SGD(model.parameters(), lr=0.0), zero.Config(timeout=20)
            )
        worst = 0.0
        for _ in range(2):
            x = batch(context.rank, device)
            with switched_on() as mode:
                engine.backward(plain(engine.module, x))
            if isinstance(mode, Operations):
                assert mode.made() == alone.made(), mode.seen
            for parameter, value in expected.items():
                have = engine.full_gradient(parameter)
                assert have is not None
                worst = max(worst, float((have - value).abs().max()))
            engine.step()
        found[name] = worst
    return found


def quiet_body(context: Context, saved: str) -> dict[str, float]:
    with warnings.catch_warnings():
        return contexts_body(context, saved)


@pytest.mark.parametrize("saved", [pytest.param("all", marks=pytest.mark.host), "addmm", ""])
def test_modes_of_the_program(cluster: Clusters, saved: str) -> None:
    for found in cluster(2).run(quiet_body, saved=saved):
        assert max(found.values()) < 1e-6, found
