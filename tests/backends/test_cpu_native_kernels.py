"""Native kernels against the torch reference, and against themselves: threads, slices, processors, forks."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from ctypes import CDLL
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from accelz import Kernels
from accelz.dynamic_map import BLOCK, SIGNED, UNSIGNED
from accelz.roles.kernels import LIMITS
from accelz.updates import AdamWUpdate, LionUpdate, MomentumUpdate, SgdUpdate
from accelz_cpu import native
from accelz_cpu.native_kernels import NativeKernels

REFERENCE = Kernels()
ULP = torch.finfo(torch.float32).eps
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
NUMEL = 300_007
OPTIONS: dict[str, Any] = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}


@pytest.fixture(scope="module")
def library() -> CDLL:
    loaded = native.library()
    if loaded is None:
        pytest.skip("the native library was not built here")
    return loaded


@pytest.fixture
def kernels(library: CDLL) -> NativeKernels:
    return NativeKernels(library)


@pytest.fixture(autouse=True)
def restored(library: CDLL) -> Iterator[None]:
    threads, isa = torch.get_num_threads(), library.accelz_isa()
    yield
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)
    assert library.accelz_use_isa(isa) == 0


def state(dtype: torch.dtype = torch.bfloat16, numel: int = NUMEL) -> dict[str, Tensor]:
    rows = torch.randn(4, numel, generator=torch.Generator().manual_seed(5))
    return {
        "master": rows[0],
        "grad": rows[1].to(dtype),
        "exp_avg": rows[2] * 0.1,
        "exp_avg_sq": rows[3].square() * 0.01,
        "weights": torch.zeros(numel, dtype=torch.bfloat16),
    }


def step(kernels: Kernels, values: dict[str, Tensor], number: float = 3.0, **options: Any) -> None:
    kernels.step(AdamWUpdate(**values, step=torch.tensor(number), **{**OPTIONS, **options}))


def sgd(kernels: Kernels, values: dict[str, Tensor], *, buffer: bool, **options: Any) -> None:
    """buffer: whether there is momentum, whose buffer is exp_avg."""
    shared = {name: values[name] for name in ("master", "grad", "weights")}
    settings = {"lr": 0.01, "weight_decay": 0.1, **options}
    if buffer:
        moment = {"momentum_buffer": values["exp_avg"], "momentum": 0.9}
        kernels.step(MomentumUpdate(**shared, **moment, **settings))
    else:
        kernels.step(SgdUpdate(**shared, **settings))


def lion(kernels: Kernels, values: dict[str, Tensor], **options: Any) -> None:
    state = {name: values[name] for name in ("master", "grad", "weights", "exp_avg")}
    settings = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, **options}
    kernels.step(LionUpdate(**state, **settings))


STEPS: dict[str, Callable[..., None]] = {
    "adamw": step,
    "sgd": partial(sgd, buffer=False),
    "momentum": partial(sgd, buffer=True),
    "nesterov": partial(sgd, buffer=True, nesterov=True),
    "lion": lion,
}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("dtype", FLOATS)
def test_adamw_differs_from_the_reference_by_units_in_the_last_place(
    kernels: NativeKernels, dtype: torch.dtype, decoupled: bool
) -> None:
    """The stated bound: 4 ulp of the value; where terms cancel, of the terms (here around 0.1)."""
    mine, theirs = state(dtype), state(dtype)
    for number in range(1, 4):
        step(kernels, mine, float(number), decoupled=decoupled)
        step(REFERENCE, theirs, float(number), decoupled=decoupled)
    for name in ("master", "exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(mine[name], theirs[name], rtol=4 * ULP, atol=4 * ULP * 0.1)


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "maximize": {"maximize": True},
    "no weight decay": {"weight_decay": 0.0},
    "scaled": {"grad_scale": torch.tensor(0.3)},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ["sgd", "momentum", "nesterov"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_sgd_differs_from_the_reference_by_units_in_the_last_place(
    kernels: NativeKernels, dtype: torch.dtype, name: str, variant: str
) -> None:
    """The stated bound: 4 ulp of the value; where terms cancel, of the terms (here around 1)."""
    mine, theirs = state(dtype), state(dtype)
    for _ in range(3):
        STEPS[name](kernels, mine, **VARIANTS[variant])
        STEPS[name](REFERENCE, theirs, **VARIANTS[variant])
    for value in ("master", "exp_avg"):
        torch.testing.assert_close(mine[value], theirs[value], rtol=4 * ULP, atol=4 * ULP)
    assert torch.equal(mine["weights"], mine["master"].bfloat16())
    assert torch.equal(mine["exp_avg"], state(dtype)["exp_avg"]) == (name == "sgd")


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("betas", [(0.9, 0.99), (0.3, 0.2)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_lion_differs_from_the_reference_by_units_in_the_last_place(
    kernels: NativeKernels, dtype: torch.dtype, betas: tuple[float, float], variant: str
) -> None:
    """The bound of sgd, except where the direction is too close to zero for its sign to be certain."""
    options = {**VARIANTS[variant], "beta1": betas[0], "beta2": betas[1]}
    mine, theirs = state(dtype), state(dtype)
    m, g = mine["exp_avg"].double(), mine["grad"].double() * float(options.get("grad_scale", 1))
    direction = m.lerp(-g if options.get("maximize") else g, 1 - betas[0])
    certain = direction.abs() > 4 * ULP * (m.abs() + g.abs())
    assert certain.float().mean() > 0.999
    STEPS["lion"](kernels, mine, **options)
    STEPS["lion"](REFERENCE, theirs, **options)
    bound = {"rtol": 4 * ULP, "atol": 4 * ULP}
    torch.testing.assert_close(mine["master"][certain], theirs["master"][certain], **bound)
    torch.testing.assert_close(mine["exp_avg"], theirs["exp_avg"], **bound)
    assert torch.equal(mine["weights"], mine["master"].bfloat16())


@pytest.mark.parametrize("name", STEPS)
def test_gradients_that_are_not_finite_do_what_they_do_in_the_reference(
    kernels: NativeKernels, library: CDLL, name: str
) -> None:
    for isa in (b"baseline", b"avx2", b"avx512"):
        if library.accelz_use_isa(isa):
            continue
        mine, theirs = state(torch.float32, 301), state(torch.float32, 301)
        for values in (mine, theirs):
            values["grad"][::2] = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0]).repeat(38)[
                :151
            ]
            values["exp_avg"][::3] = 0.0
            STEPS[name](REFERENCE if values is theirs else kernels, values)
        for value in ("master", "exp_avg"):
            torch.testing.assert_close(mine[value], theirs[value], rtol=4 * ULP, atol=4 * ULP, equal_nan=True)


@pytest.mark.parametrize("name", STEPS)
def test_steps_are_the_same_for_any_threads_slices_and_instruction_set(
    kernels: NativeKernels, library: CDLL, name: str
) -> None:
    step = STEPS[name]
    expected = state()
    torch.set_num_threads(1)
    step(kernels, expected)
    for threads in (2, 3):
        torch.set_num_threads(threads)
        got = state()
        step(kernels, got)
        assert same(got, expected), threads
    for size in (1, 1023, 65_536, 100_001):
        got = state()
        bounds = range(0, 3 * size, size) if size == 1 else range(0, NUMEL, size)
        for start in bounds:
            step(kernels, {name: value[start : start + size] for name, value in got.items()})
        end = bounds[-1] + size
        assert all(torch.equal(got[n][:end], expected[n][:end]) for n in got), size
    for isa in (b"baseline", b"avx2", b"avx512"):
        if library.accelz_use_isa(isa) == 0:
            got = state()
            step(kernels, got)
            assert same(got, expected), isa


@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("source", FLOATS)
def test_casts_and_sums_equal_torch(
    kernels: NativeKernels, library: CDLL, source: torch.dtype, target: torch.dtype
) -> None:
    """Bit for bit, for every 16-bit value and on every instruction set; NaN stays NaN."""
    patterns = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16)
    values = {
        torch.float32: torch.cat([torch.randn(70_001) * 10.0**e for e in range(-10, 6)]),
        torch.bfloat16: patterns.view(torch.bfloat16),
        torch.float16: patterns.view(torch.float16),
    }[source]
    addend = torch.randn(values.numel()).to(source)
    for isa in (b"baseline", b"avx2", b"avx512"):
        if library.accelz_use_isa(isa):
            continue
        for scale in (None, torch.tensor(1 / 3)):
            mine, theirs = (torch.zeros(values.numel(), dtype=target) for _ in range(2))
            kernels.scale_cast(mine, values, scale)
            REFERENCE.scale_cast(theirs, values, scale)
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
        mine, theirs = values.to(target, copy=True), values.to(target, copy=True)
        kernels.accumulate(mine, addend)
        theirs = (theirs.float() + addend.float()).to(target)
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("codes_dtype", sorted(LIMITS, key=str))
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("block", [32, 128, 4096])
def test_quantised_values_equal_the_reference_s(
    kernels: NativeKernels, library: CDLL, codes_dtype: torch.dtype, dtype: torch.dtype, block: int
) -> None:
    """Bit for bit, at every size of values, with blocks of zeros, of what is not finite, and a short one."""
    numel = 70_001
    powers = torch.randint(-44, 38, (numel // 4096 + 1,)).repeat_interleave(4096)
    source = torch.randn(numel) * 10.0 ** powers[:numel].float()
    source[: 2 * block] = 0
    source[5 * block + 3], source[7 * block + 1], source[7 * block + 2] = -math.inf, math.nan, 0.0
    source = source.to(dtype)
    expected = _quantised(REFERENCE, source, codes_dtype, block)
    for isa in (b"baseline", b"avx2", b"avx512"):
        if library.accelz_use_isa(isa):
            continue
        for threads in (1, 3):
            torch.set_num_threads(threads)
            for mine, theirs in zip(_quantised(kernels, source, codes_dtype, block), expected, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


def _quantised(
    kernels: Kernels, source: Tensor, codes_dtype: torch.dtype, block: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes as bytes, scales, and the values that are made of them."""
    codes = torch.zeros(source.numel(), dtype=codes_dtype)
    scales, values = torch.zeros(-(-source.numel() // block)), torch.zeros_like(source)
    kernels.quantise(codes, scales, source, block)
    kernels.dequantise(values, codes, scales, block)
    return codes.view(torch.uint8), scales, values


@pytest.mark.parametrize("codes_dtype", sorted(LIMITS, key=str))
@pytest.mark.parametrize("dtype", FLOATS)
def test_every_code_means_what_it_means_in_torch(
    kernels: NativeKernels, library: CDLL, codes_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    codes, scales = torch.arange(256, dtype=torch.uint8).view(codes_dtype), torch.tensor([1.0, 0.3])
    for isa in (b"baseline", b"avx2", b"avx512"):
        if library.accelz_use_isa(isa):
            continue
        mine, theirs = torch.zeros(256, dtype=dtype), torch.zeros(256, dtype=dtype)
        kernels.dequantise(mine, codes, scales, 128)
        REFERENCE.dequantise(theirs, codes, scales, 128)
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


def test_the_norm_depends_on_the_values_alone(kernels: NativeKernels) -> None:
    tensors = [
        torch.randn(n).to(d)
        for n, d in ((1_000_003, torch.bfloat16), (17, torch.float32), (0, torch.float16))
    ]
    torch.set_num_threads(1)
    expected = kernels.norm_and_nonfinite(tensors)
    torch.set_num_threads(3)
    assert torch.equal(kernels.norm_and_nonfinite(tensors), expected)
    exact = sum(t.double().square().sum() for t in tensors)
    assert abs(expected[0].double() - exact) < 1e-6 * exact


def test_squares_that_overflow_are_infinite(kernels: NativeKernels) -> None:
    for values in (torch.full((3,), 1e30), torch.full((1 << 21,), 1.5e16)):
        total, flag = kernels.norm_and_nonfinite([values]).tolist()
        assert (total, flag) == (float("inf"), 1.0)


def test_what_the_library_cannot_do_goes_to_torch(kernels: NativeKernels) -> None:
    wide = torch.randn(100, dtype=torch.float64)
    assert kernels.norm_and_nonfinite([wide])[0].item() == pytest.approx(wide.square().sum().item(), rel=1e-5)
    strided, total = torch.randn(200)[::2], torch.ones(100)
    kernels.accumulate(total, strided)
    assert torch.equal(total, 1 + strided)
    output = torch.zeros(100, dtype=torch.float64)
    kernels.scale_cast(output, strided, torch.tensor(2.0))
    assert torch.equal(output, (strided * 2).double())


@pytest.mark.parametrize("name", ["sgd", "momentum", "nesterov", "lion"])
def test_masters_that_the_library_cannot_update_go_to_torch(kernels: NativeKernels, name: str) -> None:
    """Like the reference, bit for bit: fp64 masters, and gradients that are not contiguous."""
    for change in ("fp64", "strided"):
        mine, theirs = state(torch.float32, 1000), state(torch.float32, 1000)
        for values in (mine, theirs):
            if change == "fp64":
                values |= {key: values[key].double() for key in ("master", "exp_avg")}
            else:
                values["grad"] = values["grad"].repeat_interleave(2)[::2]
            STEPS[name](REFERENCE if values is theirs else kernels, values)
        assert same(mine, theirs), change


def test_tensors_of_different_lengths_are_refused(kernels: NativeKernels) -> None:
    with pytest.raises(ValueError, match=r"one length, got \[3, 4\]"):
        kernels.accumulate(torch.zeros(4), torch.zeros(3))
    for name in STEPS:
        values = {key: torch.zeros(3 if key == "weights" else 4) for key in state(numel=4)}
        with pytest.raises(ValueError, match=r"one length, got \[3, 4\]"):
            STEPS[name](kernels, values)


def test_workers_flush_subnormals_as_the_caller_does(kernels: NativeKernels) -> None:
    tiny = torch.full((NUMEL,), 1e-39)
    for flush in (False, True):
        assert torch.set_flush_denormal(flush)
        for threads in (1, 3):
            torch.set_num_threads(threads)
            output = torch.ones(NUMEL)
            kernels.scale_cast(output, tiny, torch.tensor(1.0))
            assert (output == 0).sum().item() == (NUMEL if flush else 0), (flush, threads)


def test_a_forked_process_starts_threads_of_its_own(kernels: NativeKernels) -> None:
    torch.set_num_threads(3)
    expected, mine = state(), state()
    step(kernels, expected)
    child = os.fork()
    if child == 0:  # torch's own threads do not survive a fork: nothing parallel of torch here
        ok = False
        try:
            step(kernels, mine)
            ok = mine["master"].numpy().tobytes() == expected["master"].numpy().tobytes()
        finally:
            os._exit(0 if ok else 1)
    deadline = time.monotonic() + 30
    ended, status = 0, -1
    while not ended and time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.01)
    if not ended:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert (ended, status) == (child, 0)


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("name", [name for name in STEPS if name != "sgd"])
def test_moments_in_bf16_are_the_references_but_for_few(
    kernels: NativeKernels, library: CDLL, name: str, stochastic: bool
) -> None:
    """Where the exact value is within rounding of the border between two neighbours, it may become the other
    one; at random it may wherever the last bits of fp32 differ. The bits are the same for any slicing and
    instruction set."""

    def stepped(served: Kernels, size: int = NUMEL) -> dict[str, Tensor]:
        values = state(torch.bfloat16)
        for moment in ("exp_avg", "exp_avg_sq"):
            values[moment] = values[moment].bfloat16()
        for start in range(0, NUMEL, size):
            part = {name: value[start : start + size] for name, value in values.items()}
            STEPS[name](served, part, stochastic=stochastic)
        return values

    mine, theirs = stepped(kernels), stepped(REFERENCE)
    assert not same(mine, state(torch.bfloat16))
    for moment in ("exp_avg", "exp_avg_sq"):
        differ = mine[moment] != theirs[moment]
        assert differ.float().mean() < (0.2 if stochastic else 0.002)
        torch.testing.assert_close(mine[moment], theirs[moment], rtol=2**-7, atol=1e-6)
    assert same(stepped(kernels, 65_537), mine)
    for isa in (b"baseline", b"avx2", b"avx512"):
        if library.accelz_use_isa(isa) == 0:
            assert same(stepped(kernels), mine), isa


@pytest.mark.parametrize("name", [name for name in STEPS if name != "sgd"])
def test_moments_in_8_bits_are_the_references_but_for_few(
    kernels: NativeKernels, library: CDLL, name: str
) -> None:
    """Codes where the exact value is within rounding of the middle between two may be neighbours; scales
    differ by rounding. The bits are the same for any slicing by blocks and on any instruction set."""

    def stepped(served: Kernels, size: int = NUMEL) -> dict[str, Tensor]:
        values = state(torch.bfloat16)
        scales = {}
        for moment, each in (("exp_avg", SIGNED), ("exp_avg_sq", UNSIGNED)):
            values[moment], scales[moment] = each.encode(values[moment])
        for start in range(0, NUMEL, size):
            part = {name: value[start : start + size] for name, value in values.items()}
            blocks = slice(start // BLOCK, -(-(start + size) // BLOCK))
            own = tuple(scales)[: 2 if name == "adamw" else 1]
            STEPS[name](served, part, scales=tuple(scales[moment][blocks] for moment in own))
        return values | {f"{moment} scales": value for moment, value in scales.items()}

    mine, theirs = stepped(kernels), stepped(REFERENCE)
    for moment in ("exp_avg", "exp_avg_sq"):
        differ = mine[moment].int() - theirs[moment].int()
        assert (differ != 0).float().mean() < 0.002
        assert (differ.abs() <= 1).all()
    torch.testing.assert_close(mine["exp_avg scales"], theirs["exp_avg scales"], rtol=4 * ULP, atol=0)
    assert same(stepped(kernels, 256 * BLOCK), mine)
    for isa in (b"baseline", b"avx2", b"avx512"):
        if library.accelz_use_isa(isa) == 0:
            assert same(stepped(kernels), mine), isa


def test_the_library_has_the_map_of_the_reference(kernels: NativeKernels) -> None:
    """A step without gradient, momentum 1 and one code per block decodes and encodes every code."""
    for sign in (0, 128):
        codes = torch.full((256 * BLOCK,), 127 + sign, dtype=torch.uint8)
        codes[1::BLOCK] = torch.arange(256, dtype=torch.uint8)
        scales, before = torch.full((256,), 0.3), codes.clone()
        master, grad = torch.zeros(2, codes.numel())
        update = MomentumUpdate(
            master=master, grad=grad, momentum_buffer=codes, momentum=1.0, lr=1.0, weight_decay=0.0,
            scales=(scales,),
        )  # fmt: skip
        kernels.step(update)
        assert torch.equal(master, -SIGNED.decode(before, scales))
        before[before == 128] = 0  # there is one 0
        assert torch.equal(codes, before)
