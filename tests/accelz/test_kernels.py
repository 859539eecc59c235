"""The torch references of the kernels against torch's own optimizers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from accelz import BackendError, Kernels, NullStreams
from accelz.conformance.steps import StepCase
from accelz.roles.kernels import LIMITS, NAMES
from accelz.updates import UPDATES, AdamWUpdate, joined_master, split_master

N, STEPS = 301, 12


class _Tiny(Kernels):
    """The references in very small pieces."""

    chunk = 7


@pytest.fixture(params=[Kernels, _Tiny])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    kind: type[Kernels] = request.param
    return kind()


def _state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"master": torch.randn(N), "exp_avg": torch.zeros(N), "exp_avg_sq": torch.zeros(N)}


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_adamw_follows_torchs_optimizer(
    kernels: Kernels, kind: Any, weight_decay: float, maximize: bool
) -> None:
    state = _state()
    parameter = torch.nn.Parameter(state["master"].clone())
    optimizer = kind(
        [parameter], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=weight_decay, maximize=maximize
    )
    for step in range(1, STEPS + 1):
        grad = torch.randn(N)
        parameter.grad = grad.clone()
        optimizer.step()
        update = AdamWUpdate(
            **state,
            grad=grad,
            step=torch.tensor(float(step)),
            lr=1e-2,
            beta1=0.9,
            beta2=0.95,
            eps=1e-8,
            weight_decay=weight_decay,
            decoupled=kind is torch.optim.AdamW,
            maximize=maximize,
        )
        kernels.step(update)
    assert torch.allclose(state["master"], parameter, rtol=1e-6, atol=1e-7)
    theirs = optimizer.state[parameter]
    assert torch.allclose(state["exp_avg"], theirs["exp_avg"], rtol=1e-6, atol=1e-7)
    assert torch.allclose(state["exp_avg_sq"], theirs["exp_avg_sq"], rtol=1e-6, atol=1e-9)


def test_pieces_change_no_bit() -> None:
    results = []
    for kernels in (Kernels(), _Tiny()):
        state = _state()
        grad = torch.linspace(-1, 1, N).bfloat16()
        weights = torch.zeros(N, dtype=torch.bfloat16)
        options: dict[str, Any] = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
        kernels.step(AdamWUpdate(**state, grad=grad, step=torch.tensor(1.0), weights=weights, **options))
        results.append((state["master"], weights))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("block", [32, 64, 256])
def test_quantising_in_pieces_changes_no_bit(dtype: torch.dtype, block: int) -> None:
    source = torch.linspace(-3, 5, N)
    results = []
    for kernels in (Kernels(), _Tiny()):
        codes, scales = torch.zeros(N, dtype=dtype), torch.zeros(-(-N // block))
        back = torch.zeros(N, dtype=torch.bfloat16)
        kernels.quantise(codes, scales, source, block)
        kernels.dequantise(back, codes, scales, block)
        results.append((codes.float(), scales, back))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    assert torch.allclose(results[0][2].float(), source, atol=5 / 14)


def test_quantising_says_what_does_not_fit(kernels: Kernels) -> None:
    codes, scales, source = torch.zeros(N, dtype=torch.int8), torch.zeros(5), torch.zeros(N)
    with pytest.raises(ValueError, match="a block of 32 to 4096, a power of two, got 48"):
        kernels.quantise(codes, scales, source, 48)
    with pytest.raises(ValueError, match=r"got torch\.float32, torch\.float32 and torch\.int8"):
        kernels.dequantise(codes, source, scales, 64)
    with pytest.raises(
        ValueError, match=r"ceil\(n / 128\) scales.* got shapes \(301,\), \(301,\) and \(5,\)"
    ):
        kernels.quantise(codes, scales, source, 128)


@pytest.mark.parametrize(
    ("moments", "scales", "got"),
    [
        (torch.uint8, [torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16)], r"\(2, torch\.bfloat16\)\]"),
        (torch.uint8, [torch.zeros(2), torch.zeros(1)], r"scales \[\(2, .*\), \(1, torch\.float32\)\]"),
        (torch.uint8, [], r"scales \[\]"),
        (torch.float32, [torch.zeros(2), torch.zeros(2)], r"moments in \[torch\.float32, torch\.float32\]"),
    ],
)
def test_steps_say_which_scales_do_not_fit(
    moments: torch.dtype, scales: list[torch.Tensor], got: str
) -> None:
    state = _state() | {name: torch.zeros(N, dtype=moments) for name in AdamWUpdate.moment_names}
    given: dict[str, Any] = {"grad": torch.zeros(N), "step": torch.ones(()), "lr": 1.0, "weight_decay": 0.0}
    given |= {"beta1": 0.9, "beta2": 0.9, "eps": 1e-8}
    with pytest.raises(ValueError, match=r"each with 2 scales in torch\.float32.*got.*" + got):
        AdamWUpdate(**state, **given, scales=tuple(scales))


def test_scale_cast_leaves_an_fp32_source_alone(kernels: Kernels) -> None:
    source = torch.ones(N)
    output = torch.empty(N)
    kernels.scale_cast(output, source, torch.tensor(0.5))
    assert torch.equal(source, torch.ones(N))
    assert torch.equal(output, torch.full((N,), 0.5))


def test_scale_cast_may_write_its_own_source(kernels: Kernels) -> None:
    values = torch.ones(N)
    kernels.scale_cast(values, values, torch.tensor(0.5))
    assert torch.equal(values, torch.full((N,), 0.5))


def test_the_origin_of_each_kernel() -> None:
    class Own(Kernels):
        def accumulate(self, total: torch.Tensor, addend: torch.Tensor) -> None:
            total += addend

    assert {Kernels().origin(name) for name in NAMES} == {"torch reference"}
    assert Own().origin("accumulate").endswith("Own")
    assert Own().origin("adamw") == "torch reference"
    with pytest.raises(AttributeError, match="no kernel called 'nosuch'; the names are adamw"):
        Kernels().origin("nosuch")


@pytest.mark.parametrize("numel", [1, 7, 33, 1023, 70_001])
@pytest.mark.parametrize("kernel", UPDATES)
def test_a_reference_with_rates_has_the_bits_of_one_with_numbers(kernel: str, numel: int) -> None:
    for settings in ({}, {"lr": 0.3, "weight_decay": 0.0}, {"lr": 0.0}):
        results = []
        for with_rates in (False, True):
            case = StepCase(kernel, numel, settings=settings, grad_scale=0.5, skip=0.0)
            values = list(case.inputs().values())
            update = case.update(*values, weights=None)
            rates = torch.tensor([update.lr, update.decay])
            Kernels().step(replace(update, lr=7.0, rates=rates) if with_rates else update)
            results.append(values)
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("flush", [False, True])
def test_masters_are_split_and_joined_bit_for_bit(flush: bool) -> None:
    """But for ties that are rounded down; denormals also where the host takes them for zero."""
    ties = (torch.arange(1 << 16) << 16) + 0x8000
    small = torch.arange(1 << 18)
    every = torch.cat([ties, small, small + (1 << 31), torch.arange(0, 1 << 32, 9973)])
    bits = every.to(torch.int32)
    master = bits.view(torch.float32)
    if not torch.set_flush_denormal(flush):
        pytest.skip("this processor takes no denormals for zero")
    try:
        weights, remainder = split_master(master)
        got = joined_master(weights, remainder).view(torch.int32)
    finally:
        torch.set_flush_denormal(False)
    nan = master.isnan()
    assert torch.equal(got.view(torch.float32).isnan(), nan)
    assert torch.equal(weights[~nan], master.bfloat16()[~nan])
    tied_down = (bits & 0x1FFFF) == 0x8000
    assert torch.equal(got[~nan], (bits - tied_down.int())[~nan])


def test_rates_are_two_numbers_in_fp32_as_the_master_is() -> None:
    """Kernels read two floats from an address, and rates in fp32 are not an fp64 master's numbers."""
    inputs = StepCase("sgd", 3).inputs().values()
    narrow = StepCase("sgd", 3).update(*inputs, weights=None)
    wide = StepCase("sgd", 3).update(*(value.double() for value in inputs), weights=None)
    strided, right = torch.zeros(4)[::2], torch.zeros(2)
    for update, rates in (
        (narrow, torch.zeros(3)),
        (narrow, right.double()),
        (narrow, strided),
        (wide, right),
    ):
        with pytest.raises(ValueError, match=r"expected contiguous rates of shape \(2,\) in torch.float32"):
            replace(update, rates=rates)


def test_a_device_without_graphs_says_so() -> None:
    with pytest.raises(BackendError, match=r"captures no graphs: ask Capabilities.graph_capture"):
        NullStreams().capture(lambda: None)
