"""What loops do with `loss.backward()` beyond one backward of one loss: with plain torch's gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.models import device_of
from tests.zero.helpers.training import where_kernels_are
from tests.zero.helpers.ways import WIDTH, batch

Way = Callable[[nn.Module, Tensor], None]
"""Runs forwards and backwards, of one rank's batch."""


def chain(out: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(5)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, out))


def retained(model: nn.Module, x: Tensor) -> None:
    """Two losses of one forward."""
    y = model(x)
    y.square().mean().backward(retain_graph=True)
    y.abs().mean().backward()


def repeated(model: nn.Module, x: Tensor) -> None:
    """One loss, three times."""
    loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    loss.backward()


def of_a_part(model: nn.Module, x: Tensor) -> None:
    """Gradients of an inner value, which leave the last layers out, before those of the loss."""
    inner = model[:2](x)
    inner.square().mean().backward(retain_graph=True)
    model[2:](inner).mean().backward()


def given(model: nn.Module, x: Tensor) -> None:
    """Outputs with gradients from elsewhere, as in a pipeline's stage."""
    y = model(x)
    torch.autograd.backward([y, y.square()], [torch.ones_like(y), torch.full_like(y, 0.5)])


def penalised(model: nn.Module, x: Tensor) -> None:
    """The gradient penalty of Gulrajani et al. (arXiv:1704.00028)."""
    x = x.requires_grad_()
    y = model(x)
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (y.mean() + (gradient.norm(dim=1) - 1).square().mean()).backward()


def several(model: nn.Module, x: Tensor) -> None:
    """Two forwards, and their backwards in the order of the forwards."""
    losses = [model(part).square().mean() for part in x.chunk(2)]
    for loss in losses:
        loss.backward()


WAYS: dict[str, Way] = {
    way.__name__: way for way in (retained, repeated, of_a_part, given, penalised, several)
}


def way_body(context: Context, name: str, **settings: Any) -> float:
    """The largest difference between the engine's gradients and the plain model's, over two steps."""
    model, device = chain(), context.accelerator.device
    plain = copy.deepcopy(model).to(device)
    for rank in range(context.size):
        WAYS[name](plain, batch(rank, device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine = zero.initialize(model, optimizer, zero.Config(timeout=20, **settings))
    worst = 0.0
    for _ in range(2):
        WAYS[name](model, batch(context.rank, device))
        for parameter, value in plain.named_parameters():
            have = engine.full_gradient(parameter)
            assert have is not None, parameter
            assert value.grad is not None
            worst = max(worst, float((have - value.grad / context.size).abs().max()))
        assert all(unit.idle or unit.resident for unit in engine.units)
        optimizer.step()
        optimizer.zero_grad()
    assert engine.steps == 2
    return worst


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("name", WAYS)
def test_gradients_are_those_of_plain_torch(cluster: Clusters, name: str, stage: int) -> None:
    assert max(cluster(2).run(way_body, name=name, stage=stage)) < 1e-6


def rounds(models: Sequence[nn.Module], optimizers: Sequence[Any], batches: Sequence[Tensor]) -> None:
    """Steps of a critic and of a generator, in which the critic is not frozen. The mean over the batches."""
    generator, critic = models
    for step in range(3):
        for x in batches:
            made = generator(x + step).detach()
            ((critic(made) - critic(x)).mean() / len(batches)).backward()
        optimizers[1].step()
        for each in optimizers:
            each.zero_grad()
        for x in batches:
            (-critic(generator(x - step)).mean() / len(batches)).backward()
        optimizers[0].step()
        for each in optimizers:
            each.zero_grad()


def sgd(models: Sequence[nn.Module]) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]


def adversaries_body(context: Context, stage: int) -> float:
    """The largest difference between weights, each model with an engine of its own, and plain models'."""
    models, device = [chain(), chain(1)], context.accelerator.device
    plain = copy.deepcopy(models)
    for each in plain:
        each.to(device)
    rounds(plain, sgd(plain), [batch(rank, device) for rank in range(context.size)])
    optimizers = sgd(models)
    engines = [
        zero.initialize(model, optimizer, zero.Config(stage=stage, timeout=20))
        for model, optimizer in zip(models, optimizers, strict=True)
    ]
    rounds(models, optimizers, [batch(context.rank, device)])
    assert [engine.steps for engine in engines] == [3, 3]
    return max(
        float((engine.full_master(name) - value).abs().max())
        for engine, model in zip(engines, plain, strict=True)
        for name, value in model.named_parameters()
    )


@pytest.mark.parametrize("stage", [1, 3])
def test_a_generator_and_its_critic_need_no_freezing(cluster: Clusters, stage: int) -> None:
    assert max(cluster(2).run(adversaries_body, stage=stage)) < 1e-6


def sum_body(context: Context, stage: int) -> float:
    """One loss that is the sum of two engines'."""
    models, device = [chain(), chain(1)], context.accelerator.device
    plain = copy.deepcopy(models)
    for each in plain:
        each.to(device)
        for rank in range(context.size):
            (each(batch(rank, device)).square().mean() / context.size).backward()
    engines = [
        zero.initialize(model, optimizer, zero.Config(stage=stage, timeout=20))
        for model, optimizer in zip(models, sgd(models), strict=True)
    ]
    x = batch(context.rank, device)
    (models[0](x).square().mean() + models[1](x).square().mean()).backward()
    worst = 0.0
    for engine, model in zip(engines, plain, strict=True):
        for name, value in model.named_parameters():
            have = engine.full_gradient(name)
            assert have is not None
            assert value.grad is not None
            worst = max(worst, float((have - value.grad).abs().max()))
    return worst


@pytest.mark.parametrize("stage", [1, 3])
def test_a_loss_is_the_sum_of_two_engines(cluster: Clusters, stage: int) -> None:
    assert max(cluster(2).run(sum_body, stage=stage)) < 1e-6


def counting_body(context: Context) -> None:
    """An engine that counts takes gradients from its own backward only, and says so."""
    models = [chain(), chain(1)]
    first, second = (
        zero.initialize(model, optimizer, zero.Config(timeout=20, gradient_accumulation_steps=number))
        for model, optimizer, number in zip(models, sgd(models), (1, None), strict=True)
    )
    x = batch(context.rank, device_of(models[0]))
    with pytest.raises(zero.UsageError, match=r"call engine\.backward\(loss\) instead, or"):
        first(x).square().mean().backward()
    with pytest.raises(zero.UsageError, match=r"another engine's backward"):
        second.backward(second(first(x)).square().mean())
    models[0].requires_grad_(False)
    second.backward(second(first(x)).square().mean())
    assert second.step()
    models[0].requires_grad_(True)
    first.backward(first(x).square().mean())
    assert first.step()


def test_an_engine_that_counts_wants_its_own_backward(cluster: Clusters) -> None:
    cluster(2).run(counting_body)


def wrapped_body(context: Context, stage: int) -> None:
    """DistributedDataParallel around the model of an engine would take the gradients for itself."""
    model = chain()
    zero_engine = zero.initialize(model, sgd([model])[0], zero.Config(timeout=20, stage=stage))
    try:
        wrapped = nn.parallel.DistributedDataParallel(model)
    except zero.ShardedParameterError:
        assert stage == 3
        return
    with pytest.raises(zero.UsageError, match="call the model itself"):
        wrapped(batch(context.rank, device_of(model)))
    assert zero_engine.steps == 0


@pytest.mark.host  # torch's wrapper has no collectives for other devices
@pytest.mark.parametrize("stage", [1, 3])
def test_a_wrapper_of_data_parallel_training_is_refused(cluster: Clusters, stage: int) -> None:
    cluster(2).run(wrapped_body, stage=stage)


def inputs_body(context: Context, stage: int) -> float:
    """Backwards that end in some parameters, other ones each time."""
    model, plain = chain(), where_kernels_are(context, chain())
    engine = zero.initialize(model, sgd([model])[0], zero.Config(timeout=20, stage=stage))
    for chosen in (slice(0, 2), slice(4, 6), slice(0, 8, 3)):
        x = batch(context.rank, device_of(model))
        model(x).square().mean().backward(inputs=list(model.parameters())[chosen])
        for rank in range(context.size):
            loss = plain(batch(rank, device_of(plain))).square().mean() / context.size
            loss.backward(inputs=list(plain.parameters())[chosen])
    worst = 0.0
    for name, value in plain.named_parameters():
        have = engine.full_gradient(name)
        assert (have is None) == (value.grad is None)
        if have is not None and value.grad is not None:
            worst = max(worst, float((have.to(value.device) - value.grad).abs().max()))
    return worst


@pytest.mark.parametrize("stage", [1, 3])
def test_backwards_end_where_they_are_told_to(cluster: Clusters, stage: int) -> None:
    assert max(cluster(2).run(inputs_body, stage=stage)) < 1e-6
