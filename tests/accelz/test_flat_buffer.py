"""Flat buffers on the host, both strategies through the same tests; `rebind` across device types."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor, nn

from accelz import (
    Capabilities,
    CopyAndKeep,
    CopyAndShrink,
    FlatBuffer,
    FlatBufferStrategy,
    Slot,
    StorageSwap,
    dense_stride,
    rebind,
)
from accelz.conformance.test_flat_buffers import Tied, slots_of

HOST = torch.device("cpu")


@pytest.fixture(params=[StorageSwap, CopyAndShrink, CopyAndKeep])
def strategy(request: pytest.FixtureRequest) -> FlatBufferStrategy:
    kind: type[FlatBufferStrategy] = request.param
    return kind(HOST)


def _flatten(
    strategy: FlatBufferStrategy, parameters: list[nn.Parameter], dtype: torch.dtype = torch.float32
) -> FlatBuffer:
    slots, numel = slots_of(parameters)
    return strategy.flatten(parameters, slots, numel, dtype)


@pytest.mark.parametrize(
    ("tensor", "stride"),
    [
        (torch.empty(3, 5), (5, 1)),
        (torch.empty(3, 5).t(), (1, 5)),
        (torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last), (60, 1, 15, 3)),
        (torch.empty(6, 4)[:, ::2], (2, 1)),
        (torch.empty(1, 4).expand(3, 4), (4, 1)),
        (torch.empty(()), ()),
        (torch.empty(0, 3), (3, 1)),
        (torch.empty(4, 1, 3).permute(2, 1, 0), (1, 3, 3)),
        (torch.empty(10)[3:7], (1,)),
    ],
)
def test_dense_stride(tensor: Tensor, stride: tuple[int, ...]) -> None:
    assert dense_stride(tensor) == stride


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_become_views_with_their_values(strategy: FlatBufferStrategy, dtype: torch.dtype) -> None:
    model = Tied()
    parameters = list(model.parameters())
    before = [p.detach().clone() for p in parameters]
    buffer = _flatten(strategy, parameters, dtype)
    for parameter, value, slot in zip(parameters, before, buffer.slots, strict=True):
        assert torch.equal(parameter, value.to(dtype))
        assert parameter.data_ptr() == buffer.data.data_ptr() + slot.offset * buffer.data.element_size()
    assert model.head.weight is model.embedding.weight
    assert buffer.parameters == tuple(parameters)


def test_release_and_materialize_under_saved_views(strategy: FlatBufferStrategy) -> None:
    layer = nn.Linear(6, 4)
    buffer = _flatten(strategy, list(layer.parameters()))
    values = buffer.data.clone()
    inputs = torch.randn(3, 6, requires_grad=True)
    out = layer(inputs)
    buffer.release()
    assert not buffer.materialized
    kept = buffer.nbytes if isinstance(strategy, CopyAndKeep) else 0
    assert buffer.data.untyped_storage().nbytes() == kept
    assert layer.weight.shape == (4, 6)
    buffer.materialize()
    buffer.data.copy_(values)
    out.sum().backward()
    assert torch.allclose(inputs.grad, layer.weight.sum(0).expand(3, 6))


def test_the_parameters_old_memory_is_given_back(strategy: FlatBufferStrategy) -> None:
    parameter = nn.Parameter(torch.ones(1000))
    freed: list[str] = []
    owner = torch.ones(1000).numpy()  # memory that tells of its end
    weakref.finalize(owner, freed.append, "freed")
    parameter.data = torch.from_numpy(owner)
    del owner
    _flatten(strategy, [parameter])
    assert freed


def test_a_state_dict_taken_before_keeps_its_values(strategy: FlatBufferStrategy) -> None:
    layer = nn.Linear(3, 2)
    state = layer.state_dict()
    expected = {name: value.clone() for name, value in state.items()}
    buffer = _flatten(strategy, list(layer.parameters()))
    buffer.data.zero_()
    assert all(torch.equal(state[name], value) for name, value in expected.items())


def test_memory_that_other_tensors_share_is_left_alone(strategy: FlatBufferStrategy) -> None:
    whole = torch.arange(20.0)
    parts = [nn.Parameter(whole[:7]), nn.Parameter(whole[7:])]
    _flatten(strategy, parts)
    assert torch.equal(torch.cat([p.detach() for p in parts]), torch.arange(20.0))
    assert torch.equal(whole, torch.arange(20.0)), "a storage that holds more than the parameter stays"


def test_two_buffers_take_turns(strategy: FlatBufferStrategy) -> None:
    parameter = nn.Parameter(torch.arange(4.0))
    wide = _flatten(strategy, [parameter])
    narrow = strategy.empty_like(wide, torch.bfloat16)
    assert not narrow.materialized
    assert parameter.dtype == torch.float32
    narrow.materialize()
    narrow.data.copy_(wide.data)
    narrow.bind()
    wide.release()
    assert parameter.dtype == torch.bfloat16
    parameter.sum().backward()
    assert parameter.grad is not None
    assert parameter.grad.dtype == torch.bfloat16
    parameter.grad = None
    wide.materialize()
    wide.data.copy_(narrow.data)
    wide.bind()
    assert torch.equal(parameter, torch.arange(4.0))


def test_an_empty_buffer_survives_its_whole_life(strategy: FlatBufferStrategy) -> None:
    parameter = nn.Parameter(torch.empty(0, 3))
    buffer = strategy.flatten([parameter], [Slot(0, (0, 3), (3, 1), 0)], 0, torch.float32)
    buffer.release()
    assert buffer.materialized, "nothing to drop"
    buffer.materialize()
    buffer.bind()
    assert parameter.shape == (0, 3)


class _Special(nn.Parameter):
    """A Parameter subclass with a mark, as model libraries have them."""


def _foreign_parameter(calls: list[str]) -> nn.Parameter:
    parameter = nn.Parameter(torch.empty(3, device="meta"))
    parameter.tag = "kept"  # type: ignore[attr-defined]
    parameter.register_hook(lambda grad: calls.append("grad"))
    parameter.register_post_accumulate_grad_hook(lambda p: calls.append("accumulated"))
    return parameter


def test_rebind_across_device_types_keeps_the_parameter() -> None:
    calls: list[str] = []
    parameter = _foreign_parameter(calls)
    module = nn.Module()
    module.weight = parameter
    rebind(parameter, torch.ones(3))
    assert module.weight is parameter
    assert isinstance(parameter, nn.Parameter)
    assert parameter.is_leaf
    assert parameter.requires_grad
    assert parameter.device == HOST
    assert parameter.tag == "kept"  # type: ignore[attr-defined]
    (module.weight * 2).sum().backward()
    assert torch.equal(parameter.grad, torch.full((3,), 2.0))
    assert sorted(calls) == ["accumulated", "grad"]


def test_handles_of_hooks_still_remove_them_after_rebind() -> None:
    calls: list[str] = []
    parameter = nn.Parameter(torch.empty(3, device="meta"))
    handles = [
        parameter.register_hook(lambda grad: calls.append("grad")),
        parameter.register_post_accumulate_grad_hook(lambda p: calls.append("accumulated")),
    ]
    rebind(parameter, torch.ones(3))
    for handle in handles:
        handle.remove()
    parameter.register_hook(lambda grad: calls.append("new"))
    parameter.sum().backward()
    assert calls == ["new"]


def test_rebind_keeps_a_frozen_parameter_frozen() -> None:
    parameter = nn.Parameter(torch.empty(3, device="meta"), requires_grad=False)
    rebind(parameter, torch.ones(3))
    assert not parameter.requires_grad
    assert torch.equal(parameter, torch.ones(3))


def test_rebind_keeps_the_class() -> None:
    parameter = _Special(torch.empty(3, device="meta"))
    rebind(parameter, torch.ones(3))
    assert type(parameter) is _Special


def test_rebind_onto_a_view_shares_its_memory() -> None:
    buffer = torch.zeros(8)
    parameter = nn.Parameter(torch.empty(3, device="meta"))
    rebind(parameter, buffer[2:5])
    buffer[2:5] = 4.0
    assert torch.equal(parameter, torch.full((3,), 4.0))


def test_rebind_across_device_types_lets_autograd_see_no_writes_to_the_buffer() -> None:
    buffer = torch.ones(8)
    parameter = nn.Parameter(torch.empty(3, device="meta"))
    rebind(parameter, buffer[2:5])
    inputs = torch.ones(3, requires_grad=True)
    loss = (inputs * parameter).sum()
    buffer.copy_(torch.ones(8))
    loss.backward()
    assert torch.equal(inputs.grad, torch.ones(3))


def test_capabilities_are_frozen_flags_and_dtypes() -> None:
    capabilities = Capabilities(streams=True)
    flags = capabilities.flags()
    assert flags["streams"] is True
    assert "dtypes" not in flags
    assert all(isinstance(value, bool) for value in flags.values())
    assert not any(Capabilities().flags().values())
    assert Capabilities().compile == "none"
    assert capabilities.dtypes == {torch.float32}
    with pytest.raises(AttributeError):
        capabilities.streams = False  # type: ignore[misc]
    assert capabilities == Capabilities(streams=True)
