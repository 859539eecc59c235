"""`loss.backward()`: a backward that begins and ends by itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.autocast_models import once
from tests.zero.helpers.models import WIDTH, Block, Stack, features, fresh, language_loss
from tests.zero.helpers.training import adamw

Backward = Callable[[zero.Engine, Tensor], Any]


def by_engine(engine: zero.Engine, loss: Tensor) -> None:
    engine.backward(loss)


def by_autograd(engine: zero.Engine, loss: Tensor) -> None:
    loss.backward()


def trained(
    context: Context, backward: Backward, steps: int = 3, layers: int = 3, **settings: Any
) -> dict[str, Tensor]:
    """The weights after some steps of two micro-batches each."""
    model = fresh(layers)
    engine = zero.initialize(model, adamw(model), zero.Config(timeout=20, **settings))
    for step in range(steps):
        for part in range(2):
            loss = language_loss(model, 2 * step + part, context.rank)
            backward(engine, loss if settings["gradient_accumulation_steps"] else loss / 2)
        assert engine.step()
    with zero.gathered(model):
        return {name: value.clone().cpu() for name, value in model.state_dict().items()}


def loops_body(context: Context, **settings: Any) -> bool:
    compiled = {"compile": zero.Compile(inner="aot_eager"), "gradient_accumulation_steps": None}
    counted = trained(context, by_engine, 2, 2, gradient_accumulation_steps=2, **settings)
    plain = trained(context, by_autograd, 2, 2, **compiled, **settings)
    return all(torch.equal(plain[name], value) for name, value in counted.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "settings"),
    [
        pytest.param(1, {}, marks=pytest.mark.host),
        (2, {}),
        pytest.param(2, {"stage": 1, "precision": "bf16"}, marks=pytest.mark.host),
    ],
)
def test_compiled_loops_have_the_same_bits(cluster: Clusters, size: int, settings: dict[str, Any]) -> None:
    """As eager ones have in `gradients/test_windows.py`: as the engine's loop without graphs, too."""
    assert all(cluster(size).run(loops_body, limit=200, **settings))


def local_body(context: Context, stage: int) -> bool:
    """Without an exchange in the block of no_sync, sums are those of local accumulation."""
    chosen: dict[str, Any] = {"stage": stage, "accumulate": "local"}
    counted = trained(context, by_engine, gradient_accumulation_steps=2, **chosen)
    model, seen = fresh(), []
    engine = zero.initialize(
        model, adamw(model), zero.Config(timeout=20, gradient_accumulation_steps=None, **chosen)
    )
    for step in range(3):
        before = engine.traffic.calls.copy()
        with engine.no_sync():
            (language_loss(model, 2 * step, context.rank) / 2).backward()
        seen.append(engine.traffic.calls["reduce_scatter"] == before["reduce_scatter"])
        with pytest.raises(zero.UsageError, match="no_sync"):
            engine.step()
        (language_loss(model, 2 * step + 1, context.rank) / 2).backward()
        engine.step()
    with zero.gathered(model):
        return all(seen) and all(torch.equal(v.cpu(), counted[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize("stage", [1, 3])
def test_no_sync_exchanges_no_gradients(cluster: Clusters, stage: int) -> None:
    assert all(cluster(2).run(local_body, stage=stage))


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        raise ArithmeticError("in the backward")


Gradients = dict[str, Tensor | None]


def taken(engine: zero.Engine) -> Gradients:
    """The gradients, which are then dropped."""
    found = {name: engine.full_gradient(name) for name, _ in engine.module.named_parameters()}
    engine.zero_grad()
    return found


def same(one: Gradients, other: Gradients) -> bool:
    pairs = [(value, other[name]) for name, value in one.items()]
    return all(a is b is None or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)


def ways_body(context: Context) -> dict[str, bool]:
    """Other ways into and through a backward, each beside one that is known."""
    torch.manual_seed(0)
    model = Stack()
    config = zero.Config(timeout=20, gradient_accumulation_steps=None)
    engine, found = zero.initialize(model, adamw(model), config), {}
    path = (0, 1, 2, 3)

    def loss(step: int, recompute: str = "") -> Tensor:
        return model(features(step, context.rank, model), path, recompute).loss  # type: ignore[no-any-return]

    def whole(step: int) -> Tensor:
        x = features(step, context.rank, model).requires_grad_()
        return checkpoint(lambda x: model(x, path).loss, x, use_reentrant=False)  # type: ignore[no-any-return]

    def fail() -> None:
        x = features(3, context.rank, model).requires_grad_()
        with pytest.raises(ArithmeticError):
            model(Failing.apply(x), path).loss.backward()

    expected: Gradients = {}
    for recompute in ("reentrant", "other", ""):
        engine.backward(loss(0, recompute))
        engine.backward(loss(1, recompute))
        expected = taken(engine)
        loss(0, recompute).backward()
        loss(1, recompute).backward()
        found[recompute] = same(taken(engine), expected)

    whole(0).backward()
    whole(1).backward()
    found["all recomputed"] = same(taken(engine), expected)

    first, second = loss(0), loss(1)
    first.backward()
    second.backward()
    found["two forwards first"] = same(taken(engine), expected)

    first, second = loss(0), loss(1)
    torch.autograd.backward([first, second], [torch.ones_like(first), torch.ones_like(second)])
    once = taken(engine)
    engine.backward(loss(0) + loss(1))
    found["two losses at once"] = same(once, taken(engine))

    loss(0).backward()
    x = features(1, context.rank, model).requires_grad_()
    torch.autograd.grad(model(x, path).loss, x)
    found["autograd.grad is no backward"] = engine._pass.backwards == 1
    loss(1).backward()
    found["autograd.grad between"] = same(taken(engine), expected)

    loss(0).backward()
    made = loss(1, "reentrant")  # where autograd comes no further, it has not looked whether it may recompute
    torch.autograd.grad(2 * made, made)
    found["autograd.grad of an output is no backward"] = engine._pass.backwards == 1
    engine.zero_grad()

    fail()
    with pytest.raises(zero.UsageError, match="without backward"):
        engine.step()
    for failures in (1, 2):
        kept = loss(0)
        for _ in range(failures):
            fail()
        kept.backward()
        loss(1).backward()
        found[f"after exceptions: {failures}"] = same(taken(engine), expected)
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_ways_through_a_backward(cluster: Clusters, size: int) -> None:
    for found in cluster(size).run(ways_body):
        assert all(found.values()), found


def two_engines_body(context: Context) -> bool:
    """A loss through two engines, beside one engine of both models."""
    torch.manual_seed(0)
    parts = [nn.Sequential(Block(WIDTH), Block(WIDTH)) for _ in range(2)]
    whole = copy.deepcopy(nn.Sequential(*parts))
    config = zero.Config(timeout=20, gradient_accumulation_steps=None)
    engines = [zero.initialize(each, adamw(each), config) for each in (*parts, whole)]
    x = features(0, context.rank, whole)
    for _ in range(2):
        engines[1](engines[0](x)).square().mean().backward()
        engines[2](x).square().mean().backward()
    both = {f"{i}.{name}": value for i in range(2) for name, value in taken(engines[i]).items()}
    return same(both, taken(engines[2]))


def test_a_loss_through_two_engines(cluster: Clusters) -> None:
    assert all(cluster(2).run(two_engines_body))


def scaled_body(context: Context) -> None:
    model = fresh()
    config = zero.Config(timeout=20, gradient_accumulation_steps=None, precision="bf16", loss_scale=8.0)
    engine = zero.initialize(model, adamw(model), config)
    with pytest.raises(zero.UsageError, match=r"engine\.backward"):
        language_loss(model, 0, context.rank).backward()
    engine.backward(language_loss(model, 0, context.rank))
    assert engine.step()


def test_a_loss_scale_needs_the_engines_backward(cluster: Clusters) -> None:
    cluster(2).run(scaled_body)


def adapted_body(context: Context, stage: int, checkpointed: bool) -> list[float]:
    """Train matrices of a frozen model under autocast, where all gradients are 16 bits wide, as an adapter's
    are. torch.autograd.grad of an input is no backward."""
    torch.manual_seed(3)
    model = once().requires_grad_(False)
    for block in model.blocks:
        block.up.weight.requires_grad_(True)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1.0)
    config = zero.Config(stage=stage, gradient_accumulation_steps=None, reduce_dtype="fp32", timeout=20)
    engine = zero.initialize(model, optimizer, config)
    embedded: list[Tensor] = []
    model.embedding.register_forward_hook(lambda _, inputs, made: embedded.append(made.requires_grad_()))
    if checkpointed:
        model.blocks[1].forward = partial(checkpoint, model.blocks[1].forward, use_reentrant=False)
    losses = []
    for step in range(6):
        with torch.autocast(context.accelerator.device.type, torch.bfloat16):
            loss = language_loss(model, step, context.rank)
        assert torch.autograd.grad(loss, embedded[-1], retain_graph=True)[0].any()
        loss.backward()
        losses.append(loss.item())
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    assert engine.steps == 3
    return losses


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_backward_begins_where_all_gradients_are_of_another_dtype(
    cluster: Clusters, checkpointed: bool
) -> None:
    sharded, whole = (
        cluster(2).run(adapted_body, stage=stage, checkpointed=checkpointed) for stage in (3, 2)
    )
    assert sharded == whole
    assert sharded[0][0] != sharded[0][4]
