"""CopyAndShrink on a device that counts its memory to the byte: the model fits once, not twice."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

import zero
from accelz import Accelerator, FlatBuffer, dense_stride
from accelz.conformance.test_flat_buffers import slots_of
from tests.simulated import capacity

from .on_sim import on_sim

MIB = 1 << 20


def _device_model(accelerator: Accelerator) -> list[nn.Parameter]:
    """31 MiB of fp32 parameters on the device, of very different sizes; the largest has 8 MiB."""
    sizes = [2 * MIB, 3, MIB, 2 * MIB, 1000, 2 * MIB, MIB // 2, MIB // 4]
    return [nn.Parameter(torch.full((n,), float(i), device=accelerator.device)) for i, n in enumerate(sizes)]


def _nbytes(tensors: Sequence[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _flatten(
    accelerator: Accelerator, parameters: Sequence[nn.Parameter], dtype: torch.dtype = torch.float32
) -> FlatBuffer:
    slots, numel = slots_of(parameters)
    return accelerator.flat_buffers.flatten(parameters, slots, numel, dtype)


def _others(accelerator: Accelerator, parameters: Sequence[nn.Parameter]) -> int:
    """Start measuring the peak; returns what is allocated apart from the parameters."""
    gc.collect()
    accelerator.memory.reset_peak()
    return accelerator.memory.stats().allocated - _nbytes(parameters)


@on_sim
def test_flattening_needs_the_model_once(accelerator: Accelerator) -> None:
    parameters = _device_model(accelerator)
    model, largest = _nbytes(parameters), max(_nbytes([p]) for p in parameters)
    others = _others(accelerator, parameters)
    buffer = _flatten(accelerator, parameters)
    peak = accelerator.memory.stats().peak - others
    assert peak <= model + largest + MIB, f"{peak} bytes for a model of {model}"
    after = accelerator.memory.stats().allocated - others
    assert after == buffer.nbytes, "the old storages are gone"
    for i, parameter in enumerate(parameters):
        assert (parameter == i).all()


@on_sim
def test_parameters_of_one_storage_are_there_once(accelerator: Accelerator) -> None:
    whole = torch.arange(4 * MIB, device=accelerator.device, dtype=torch.float32)
    parameters = [nn.Parameter(part.view(1024, -1).t()) for part in whole.split(MIB)]
    others = _others(accelerator, parameters)
    del whole
    buffer = _flatten(accelerator, parameters)
    assert accelerator.memory.stats().peak - others <= _nbytes(parameters) + MIB
    assert accelerator.memory.stats().allocated - others == buffer.nbytes
    values = torch.cat([p.detach().cpu().t().flatten() for p in parameters])
    assert torch.equal(values, torch.arange(4 * MIB, dtype=torch.float32))


@on_sim
def test_one_storage_under_several_units_is_there_once(accelerator: Accelerator) -> None:
    units = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(6)))
    whole = torch.randn(6 * 512 * 512, device=accelerator.device)
    for layer, part in zip(units, whole.split(512 * 512), strict=True):
        layer.weight = nn.Parameter(part.view(512, 512))
    before = [layer.weight.detach().cpu() for layer in units]
    model = _nbytes(before)
    others = _others(accelerator, list(units.parameters()))
    del whole, part
    engine = zero.initialize(units, torch.optim.SGD(units.parameters(), lr=0.1), zero.Config(stage=3))
    assert len(engine.units) == 6
    assert accelerator.memory.stats().peak - others <= model + MIB
    assert all(torch.equal(layer.weight.cpu(), value) for layer, value in zip(units, before, strict=True))


@on_sim
def test_a_naive_concatenation_needs_it_twice(accelerator: Accelerator) -> None:
    parameters = _device_model(accelerator)
    model = _nbytes(parameters)
    others = _others(accelerator, parameters)
    flat, end = torch.cat([p.data for p in parameters]), 0
    for parameter in parameters:
        parameter.data = flat[end : end + parameter.numel()]
        end += parameter.numel()
    peak = accelerator.memory.stats().peak - others
    assert peak >= 1.9 * model, f"{peak} bytes for a model of {model}"


@on_sim
def test_a_16_bit_buffer_of_an_fp32_model_needs_less(accelerator: Accelerator) -> None:
    parameters = _device_model(accelerator)
    model, largest = _nbytes(parameters), max(_nbytes([p]) for p in parameters)
    others = _others(accelerator, parameters)
    _flatten(accelerator, parameters, torch.bfloat16)
    assert accelerator.memory.stats().peak - others <= model + largest + MIB
    assert accelerator.memory.stats().allocated - others <= model // 2 + MIB


@on_sim
def test_a_model_that_does_not_fit_twice_is_flattened(accelerator: Accelerator) -> None:
    parameters = _device_model(accelerator)
    with capacity(accelerator, accelerator.memory.stats().allocated + 9 * MIB):
        with pytest.raises(torch.OutOfMemoryError):
            torch.cat([p.data for p in parameters])
        buffer = _flatten(accelerator, parameters)
    assert buffer.materialized
    assert (parameters[3] == 3).all()


class _Model(nn.Module):
    """Tied weights, a frozen one, a channels-last one and a transposed one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11)
        self.head.weight = self.embedding.weight
        self.head.bias.requires_grad_(False)
        self.image = nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
        self.turned = nn.Parameter(torch.randn(6, 4).t())

    def forward(self, tokens: Tensor) -> Tensor:
        values: Tensor = self.head(self.embedding(tokens)).sum() + self.image.sum() + self.turned.sum()
        return values


@on_sim
def test_a_parameter_stays_what_it_is(accelerator: Accelerator) -> None:
    torch.manual_seed(0)
    model = _Model()
    weight, calls = model.embedding.weight, []
    weight.register_hook(lambda grad: calls.append("grad"))
    weight.register_post_accumulate_grad_hook(lambda p: calls.append("accumulated"))
    before = {name: (id(p), p.requires_grad, p.detach().clone()) for name, p in model.named_parameters()}
    for dtype in (torch.float32, torch.bfloat16):  # from the host first, then from the device
        _flatten(accelerator, list(model.parameters()), dtype)
        for name, parameter in model.named_parameters():
            identity, requires_grad, value = before[name]
            assert (id(parameter), parameter.requires_grad) == (identity, requires_grad), name
            assert parameter.stride() == dense_stride(value), name
            assert parameter.device == accelerator.device, name
            assert torch.equal(parameter.detach().cpu(), value.to(dtype)), name
        assert model.head.weight is model.embedding.weight
        assert model.image.is_contiguous(memory_format=torch.channels_last)
        calls.clear()
        model(torch.arange(11, device=accelerator.device)).backward()
        assert sorted(calls) == ["accumulated", "grad"]
        assert model.head.bias.grad is None
        model.zero_grad()


@on_sim
def test_writes_to_the_buffer_are_not_writes_to_the_parameter(accelerator: Accelerator) -> None:
    layer = nn.Linear(4, 4)
    buffer = _flatten(accelerator, list(layer.parameters()))
    values = buffer.data.clone()
    inputs = torch.ones(2, 4, device=accelerator.device, requires_grad=True)
    loss = layer(inputs).sum()
    buffer.release()
    buffer.materialize()
    buffer.data.copy_(values)
    loss.backward()
    assert torch.equal(inputs.grad.cpu(), layer.weight.detach().cpu().sum(0).expand(2, 4))
