"""The kernels role: every named operation against float64, on awkward sizes, places and values."""

from __future__ import annotations

import dataclasses
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

from accelz.accelerator import Accelerator
from accelz.conformance.contract import expect, expect_close, expect_raises
from accelz.conformance.marks import about, needs, over_dtypes
from accelz.conformance.steps import (
    CASES,
    GRADIENTS,
    INFINITY,
    NAN,
    OFFSETS,
    SIZES,
    StepCase,
    usual_step,
)
from accelz.conformance.work import long_work
from accelz.dynamic_map import SMALLEST_SCALE
from accelz.roles.kernels import LIMITS, NAMES, Kernels
from accelz.updates import UPDATES

GUARD = 16
SPECIAL = (NAN, INFINITY, -INFINITY)
EPS32 = torch.finfo(torch.float32).eps
BLOCKS = (32, 256, 4096)
MANY = 300
"""Tensors of one norm: more than one launch of a multi-tensor kernel takes."""
HUGE, TAIL = (1 << 24) + 3, 1000
"""Elements: more than 65,535 blocks of 256, and how many of the last ones are checked."""
BUSY_SECONDS = 0.1
over_codes = pytest.mark.parametrize("codes_dtype", LIMITS, ids=lambda d: str(d).removeprefix("torch."))


class Guarded:
    """`values` in the middle of a larger device tensor, at a chosen misalignment, with marks around them."""

    def __init__(self, values: Tensor, offset: int, device: torch.device) -> None:
        start = GUARD + offset
        self._whole = torch.full((start + values.numel() + GUARD,), 7.0, dtype=values.dtype).to(device)
        self.view = self._whole[start : start + values.numel()]
        self.view.copy_(values)
        self._around = (slice(0, start), slice(start + values.numel(), None))

    def check(self, method: str, name: str) -> None:
        """Raise ContractBroken if anything outside the view was written."""
        outside = torch.cat([self._whole[part] for part in self._around]).cpu()
        expected = f"must not write outside {name}"
        expect_close(
            outside, torch.full_like(outside, 7.0), method, expected, do="mind the tail of odd sizes"
        )


class KernelContract:
    @about("Kernels.origin")
    def test_every_kernel_has_an_origin(self, accelerator: Accelerator) -> None:
        """Each kernel says who implements it."""
        for name in NAMES:
            origin = accelerator.kernels.origin(name)
            expect(bool(origin), "Kernels.origin", f"must say who implements {name}", repr(origin))

    @about("Kernels.step")
    @pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
    def test_step(self, accelerator: Accelerator, case: StepCase) -> None:
        """A step equals float64 within fp32 rounding, in place, within its range; the gradient is kept."""
        used = {case.grad_dtype, case.moments_dtype, case.weights_dtype} - {None, torch.uint8}
        if used <= accelerator.capabilities.dtypes:
            self.check_step(accelerator, case)
        else:
            pytest.skip(f"not declared: {used - accelerator.capabilities.dtypes}")

    def check_step(self, accelerator: Accelerator, case: StepCase) -> None:
        device, where = accelerator.device, "Kernels.step"
        inputs = case.inputs()
        placed = {name: Guarded(value, case.offset, device) for name, value in inputs.items()}
        weights = _weights(case, device)
        views = [guarded.view for guarded in placed.values()]
        update = case.update(*views, weights=None if weights is None else weights.view)
        accelerator.kernels.step(update)
        accelerator.streams.synchronize()
        after = {name: guarded.view.cpu() for name, guarded in placed.items()}
        got = case.values(after, None if weights is None else weights.view.cpu())
        for name, want in case.exact().items():
            _expect_state(got[name], want, where, name, case)
        expect_close(placed["grad"].view, inputs["grad"], where, "grad must not be written")
        if weights is not None:
            want = got["master"].to(weights.view.dtype)
            expect_close(weights.view, want, where, "weights must be master rounded once")
            weights.check(where, "weights")
        for name, guarded in placed.items():
            guarded.check(where, name)

    @about("Kernels.step")
    @pytest.mark.parametrize("kernel", [name for name in UPDATES if UPDATES[name].moment_names])
    def test_moments_rounded_at_random_keep_their_mean(self, accelerator: Accelerator, kernel: str) -> None:
        """Moments in bf16, between two of its values, become the upper one as often as they are near to it;
        they do so again with the same operands, wherever these lie, and differently in another step."""
        if torch.bfloat16 not in accelerator.capabilities.dtypes:
            pytest.skip("not declared: torch.bfloat16")
        numel, where = 40_000, "Kernels.step, stochastic"
        names = UPDATES[kernel].moment_names
        settings: dict[str, Any] = {"momentum": 0.5}
        if kernel != "momentum":
            settings = {"beta1": 0.5, "beta2": 0.5}

        def moments_after(number: float, part: slice) -> list[Tensor]:
            master = torch.linspace(-1, 1, numel)
            grad = torch.full((numel,), 1 + 2**-9 if kernel != "momentum" else 0.5 + 2**-9)
            own = [torch.ones(numel, dtype=torch.bfloat16) for _ in names]
            device = accelerator.device
            placed = [Guarded(value[part], 1, device).view for value in (master, grad, *own)]
            others = {**settings, "stochastic": True, "weight_decay": 0.0}
            step = usual_step(kernel, *placed, number=_scalar(number, device), **others)
            accelerator.kernels.step(step)
            return [moment.cpu() for moment in placed[2:]]

        whole, again = moments_after(3, slice(None)), moments_after(3, slice(1001, None))
        for name, first, second in zip(names, whole, again, strict=True):
            exact = 1 + (2**-9 if kernel == "momentum" else 2**-10)
            exact = 0.5 + 0.5 * (1 + 2**-9) ** 2 if name == "exp_avg_sq" else exact
            mean, error = first.double().mean().item(), 4 * 2**-7 / 2 / numel**0.5
            text = f"{name}: the mean of values rounded at random must be {exact} within {error}"
            expect(abs(mean - exact) <= error, where, text, str(mean))
            expect(len(first.unique()) == 2, where, f"{name} must be one of two neighbours", str(first))
            expect_close(second, first[1001:], where, f"{name} must not depend on the slice")
        if UPDATES[kernel].counts:
            other = moments_after(4, slice(None))[0]
            expect(
                not torch.equal(other, whole[0]), where, "another step must round differently", "it did not"
            )

    @about("Kernels.step")
    def test_moments_in_8_bits_keep_to_their_blocks(self, accelerator: Accelerator) -> None:
        """A NaN spreads to the moments of its block alone; averages of squares above 0 stay above it, however
        large their neighbours are; and the bits are the same wherever the blocks lie."""
        where, (first, second) = "Kernels.step, moments in 8 bits", (slice(0, 256), slice(256, 700))
        inputs = StepCase("adamw", 700, moments_dtype=torch.uint8).inputs()
        inputs["grad"][3] = NAN
        inputs["grad"][second].mul_(1e-6)
        inputs["grad"][300] = 1e6

        def stepped(start: int) -> dict[str, Tensor]:
            case = StepCase("adamw", moments_dtype=torch.uint8)
            parts = {n: v[start // 256 if "scales" in n else start :] for n, v in inputs.items()}
            placed = {name: Guarded(value, 1, accelerator.device).view for name, value in parts.items()}
            accelerator.kernels.step(case.update(*placed.values(), weights=None))
            return case.values({name: value.cpu() for name, value in placed.items()})

        whole, part = stepped(0), stepped(256)
        for name in UPDATES["adamw"].moment_names:
            expect(bool(whole[name][first].isnan().all()), where, f"{name}: a block has a NaN", "it has none")
            finite = bool(whole[name][second].isfinite().all())
            expect(finite, where, f"the NaN must not leave its block of {name}", str(whole[name]))
            expect_close(part[name], whole[name][second], where, f"{name} must not depend on the slice")
        text = "an average of squares above 0 must not become 0"
        expect(bool((part["exp_avg_sq"] > 0).all()), where, text, str(part["exp_avg_sq"]))

    @about("Kernels.step")
    def test_split_masters_at_ties_and_beside_other_weights(self, accelerator: Accelerator) -> None:
        """Of a tie that is rounded down, the remainder is the largest; one that is left beside a weight of
        zero makes no NaN of it."""
        if torch.bfloat16 not in accelerator.capabilities.dtypes:
            pytest.skip("not declared: torch.bfloat16")
        device, where = accelerator.device, "Kernels.step, split masters"
        weights = torch.tensor([1.0, 1 + 2**-7, 0.0, -0.0], dtype=torch.bfloat16).repeat(100)
        rest = torch.tensor([0, 0, -5, -6], dtype=torch.int16).repeat(100)
        grad = torch.tensor([-(2.0**-8), -(2.0**-8), 0.0, 0.0]).repeat(100)
        placed = [Guarded(each, 1, device).view for each in (rest, grad, weights)]
        update = usual_step("sgd", placed[0], placed[1], weights=placed[2], lr=1.0, weight_decay=0.0)
        accelerator.kernels.step(update)
        want = torch.tensor([1.0, 1 + 2**-6, 0.0, -0.0]).repeat(100)
        expect_close(placed[2].float(), want, where, "weights must be rounded to the nearest, ties to even")
        want = torch.tensor([2**15 - 1, -(2**15), 0, 0]).repeat(100)
        expect_close(placed[0].float(), want.float(), where, "remainders must be what the weights lack")

    @about("Kernels.step")
    def test_adamw_over_many_steps(self, accelerator: Accelerator) -> None:
        """Errors do not build up: after 30 steps the weights are still within fp32 rounding of float64."""
        case = StepCase("adamw", numel=257)
        state = {name: value.to(accelerator.device) for name, value in case.inputs().items()}
        master = state["master"].cpu().double().requires_grad_()
        optimizer = torch.optim.AdamW([master], lr=1e-3, betas=(0.9, 0.999), weight_decay=0.1)
        for name in ("exp_avg", "exp_avg_sq"):
            state[name].zero_()
        for number in range(1, 31):
            grad = torch.sin(torch.arange(257.0) * number)
            master.grad = grad.double()
            optimizer.step()
            state["grad"] = grad.to(accelerator.device)
            counted = dataclasses.replace(case, number=number)
            accelerator.kernels.step(counted.update(*state.values(), weights=None))
        expect_close(state["master"], master, "Kernels.step", "30 steps", rtol=1e-5, atol=1e-6)

    @about("Kernels.step", "Kernels.scale_cast")
    @pytest.mark.parametrize("name", [*UPDATES, "scale_cast"])
    def test_scalars_are_only_read(self, accelerator: Accelerator, name: str) -> None:
        """The number of a step, grad_scale, skip and scale keep their values: the caller uses them again."""
        device, kernels = accelerator.device, accelerator.kernels
        scalars = {"number": 3.0, "grad_scale": 0.5, "skip": 0.0}
        given = {scalar: _scalar(value, device) for scalar, value in scalars.items()}
        values = [torch.ones(1023, device=device) for _ in range(4)]
        for _ in range(2):
            if name in UPDATES:
                kernels.step(usual_step(name, *values[: 2 + len(UPDATES[name].moment_names)], **given))
            else:
                kernels.scale_cast(values[0], values[1], given["grad_scale"])
        method = "Kernels.step" if name in UPDATES else f"Kernels.{name}"
        for scalar, want in scalars.items():
            expect_close(given[scalar], torch.tensor(want), method, f"must not write to {scalar}")

    @about("Kernels.norm_and_nonfinite")
    @pytest.mark.parametrize("numel", SIZES)
    @over_dtypes()
    def test_norm(self, accelerator: Accelerator, numel: int, dtype: torch.dtype) -> None:
        """The sum of squares equals float64 within fp32 accumulation; finite values do not set the flag."""
        where = "Kernels.norm_and_nonfinite"
        for offset in OFFSETS:
            host = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
            got = accelerator.kernels.norm_and_nonfinite([Guarded(host, offset, accelerator.device).view])
            expect(got.shape == (2,) and got.dtype == torch.float32, where, "must be (2,) fp32", repr(got))
            want = torch.stack((host.double().square().sum(), torch.zeros((), dtype=torch.float64)))
            expect_close(got, want, where, "must be the sum of squares and 0", rtol=1e-4)

    @about("Kernels.norm_and_nonfinite")
    def test_norm_over_several_tensors(self, accelerator: Accelerator) -> None:
        """Several tensors of several dtypes, including empty ones, count as one."""
        dtypes = [d for d in (*GRADIENTS, torch.float32) if d in accelerator.capabilities.dtypes]
        hosts = [torch.randn(n).to(d) for n, d in zip((1025, 7, 0, 333), dtypes, strict=False)]
        got = accelerator.kernels.norm_and_nonfinite([h.to(accelerator.device) for h in hosts])
        want = sum(h.double().square().sum() for h in hosts)
        expected = "the sum over all"
        expect_close(got[0], torch.as_tensor(want), "Kernels.norm_and_nonfinite", expected, rtol=1e-4)

    @about("Kernels.norm_and_nonfinite")
    def test_norm_over_many_tensors(self, accelerator: Accelerator) -> None:
        """None of many tensors is left out of the sum or of the search for nonfinite values."""
        where, host = "Kernels.norm_and_nonfinite", torch.ones(7 * MANY)
        for last, want in ((2.0, [7.0 * MANY + 3, 0.0]), (SPECIAL[0], [SPECIAL[0], 1.0])):
            host[-1] = last
            got = accelerator.kernels.norm_and_nonfinite(host.to(accelerator.device).split(7))
            text = f"must include all of {MANY} tensors, also the last one"
            expect_close(got, torch.tensor(want), where, text, rtol=1e-6)

    @about("Kernels.norm_and_nonfinite")
    @pytest.mark.parametrize("special", SPECIAL, ids=str)
    @over_dtypes(*GRADIENTS)
    def test_nonfinite_is_seen(self, accelerator: Accelerator, special: float, dtype: torch.dtype) -> None:
        """One NaN or infinity anywhere, first and last element included, sets the flag."""
        for place in (0, 511, 1022):
            host = torch.ones(1023, dtype=dtype)
            host[place] = special
            parts = [torch.ones(5, device=accelerator.device), host.to(accelerator.device)]
            flag = accelerator.kernels.norm_and_nonfinite(parts)[1].item()
            expect(flag == 1.0, "Kernels.norm_and_nonfinite", f"must flag {special} at {place}", str(flag))

    @about("Kernels.norm_and_nonfinite")
    @pytest.mark.parametrize("place", [0, 511, 1022])
    @pytest.mark.parametrize("huge", [2e19, -3e38], ids=str)
    def test_squares_that_overflow_are_infinite(
        self, accelerator: Accelerator, huge: float, place: int
    ) -> None:
        """One value whose square is beyond fp32 makes the sum infinite and sets the flag."""
        host = torch.ones(1023)
        host[place] = huge
        got = accelerator.kernels.norm_and_nonfinite([host.to(accelerator.device)])
        want = torch.tensor([float("inf"), 1.0])
        expect_close(got, want, "Kernels.norm_and_nonfinite", f"({huge} at {place}) must count as infinite")

    @about("Kernels.scale_cast")
    @pytest.mark.parametrize("numel", SIZES)
    @over_dtypes(*GRADIENTS)
    def test_scale_cast(self, accelerator: Accelerator, numel: int, dtype: torch.dtype) -> None:
        """output = source × scale, rounded once; between any two dtypes, at any alignment."""
        where = "Kernels.scale_cast"
        for source_dtype in [d for d in GRADIENTS if d in accelerator.capabilities.dtypes]:
            for scale in (None, 1 / 3):
                host = torch.randn(numel, generator=torch.Generator().manual_seed(1)).to(source_dtype)
                source = Guarded(host, 1, accelerator.device)
                output = Guarded(torch.zeros(numel, dtype=dtype), 3, accelerator.device)
                factor = None if scale is None else _scalar(scale, accelerator.device)
                accelerator.kernels.scale_cast(output.view, source.view, factor)
                exact = host.float() if scale is None else host.float() * torch.tensor(scale)
                expected = "must be source * scale, rounded once"
                expect_close(output.view, exact.to(dtype), where, expected, rtol=2 * EPS32)
                expect_close(source.view, host, where, "source must not be written")
                output.check(where, "output")

    @about("Kernels.scale_cast")
    def test_scale_cast_keeps_special_values(self, accelerator: Accelerator) -> None:
        """NaN and infinities pass through; a scale of 0 or infinity acts as in IEEE arithmetic."""
        host = torch.tensor([*SPECIAL, 1.0, 0.0])
        output = torch.zeros(5, device=accelerator.device)
        for scale in (1.0, 0.0, float("inf")):
            factor = _scalar(scale, accelerator.device)
            accelerator.kernels.scale_cast(output, host.to(accelerator.device), factor)
            expect_close(output, host * scale, "Kernels.scale_cast", f"IEEE arithmetic with scale {scale}")

    @about("Kernels.scale_cast")
    @over_dtypes(*GRADIENTS)
    def test_scale_cast_overflows_to_infinity(self, accelerator: Accelerator, dtype: torch.dtype) -> None:
        """Values too large for output's dtype become infinite, and NaN and infinities stay: an overflow is
        found behind any cast."""
        for source_dtype in [d for d in GRADIENTS if d in accelerator.capabilities.dtypes]:
            large = torch.finfo(source_dtype).max
            host = torch.tensor([*SPECIAL, large, -large, 1.0], dtype=source_dtype)
            for scale in (None, 1.0, 0.5, 2.0):
                output = torch.zeros(len(host), dtype=dtype, device=accelerator.device)
                factor = None if scale is None else _scalar(scale, accelerator.device)
                accelerator.kernels.scale_cast(output, host.to(accelerator.device), factor)
                want = (host.float() * (1.0 if scale is None else scale)).to(dtype)
                text = (
                    f"{source_dtype} to {dtype}, scale {scale}: NaN stays, a value that is too large "
                    "becomes infinite"
                )
                expect_close(output, want, "Kernels.scale_cast", text)

    @about("Kernels.accumulate")
    @over_dtypes(*GRADIENTS)
    def test_accumulate_overflows_to_infinity(self, accelerator: Accelerator, dtype: torch.dtype) -> None:
        """Sums that are too large become infinite, and NaN and infinities of either summand stay."""
        large = torch.finfo(dtype).max
        host = torch.tensor([*SPECIAL, 1.0, 1.0, 1.0, large, -large, SPECIAL[1]], dtype=dtype)
        addend = torch.tensor([1.0, 1.0, 1.0, *SPECIAL, large, -large, SPECIAL[2]], dtype=dtype)
        for total_dtype in {torch.float32, dtype}:
            total = host.to(accelerator.device, total_dtype)
            accelerator.kernels.accumulate(total, addend.to(accelerator.device))
            want = (host.to(total_dtype).float() + addend.float()).to(total_dtype)
            text = f"{dtype} to {total_dtype}: NaN stays, a sum that is too large becomes infinite"
            expect_close(total, want, "Kernels.accumulate", text)

    @about("Kernels.accumulate")
    @pytest.mark.parametrize("numel", SIZES)
    @over_dtypes(*GRADIENTS)
    def test_accumulate(self, accelerator: Accelerator, numel: int, dtype: torch.dtype) -> None:
        """total += addend, a 16-bit addend widened on the fly; total rounds once in its own dtype."""
        where = "Kernels.accumulate"
        for total_dtype in {torch.float32, dtype}:
            rows = torch.randn(2, numel, generator=torch.Generator().manual_seed(2))
            host, addend = rows[0].to(total_dtype), rows[1].to(dtype)
            total, other = Guarded(host, 1, accelerator.device), Guarded(addend, 3, accelerator.device)
            accelerator.kernels.accumulate(total.view, other.view)
            want = (host.float() + addend.float()).to(total_dtype)
            expect_close(total.view, want, where, "must be the sum rounded once", rtol=EPS32)
            expect_close(other.view, addend, where, "addend must not be written")
            total.check(where, "total")

    @about("Kernels.quantise")
    @pytest.mark.parametrize("numel", SIZES)
    @over_codes
    @over_dtypes()
    def test_quantise(
        self, accelerator: Accelerator, numel: int, codes_dtype: torch.dtype, dtype: torch.dtype
    ) -> None:
        """Scales are absmax over the limit; values are within the stated error; at any alignment."""
        where = "Kernels.quantise"
        host = _uneven(numel).to(dtype)
        for block, offset in [(b, o) for b in BLOCKS for o in OFFSETS]:
            source = Guarded(host, offset, accelerator.device)
            output = Guarded(torch.zeros(numel, dtype=codes_dtype), 3 * offset, accelerator.device)
            scales = Guarded(torch.zeros(_ceil(numel, block)), offset // 2, accelerator.device)
            accelerator.kernels.quantise(output.view, scales.view, source.view, block)
            want = _absmax(host, block) / LIMITS[codes_dtype]
            expect_close(scales.view, want, where, f"absmax over the limit (block {block})", rtol=4 * EPS32)
            _expect_quantised(output.view, scales.view, host, block, where)
            expect_close(source.view, host, where, "source must not be written")
            output.check(where, "output")
            scales.check(where, "scales")

    @about("Kernels.quantise")
    @over_codes
    def test_quantise_rounds_half_to_even(self, accelerator: Accelerator, codes_dtype: torch.dtype) -> None:
        """With a scale of exactly 1, output is source rounded to the nearest, ties to the even code."""
        limit = LIMITS[codes_dtype]
        halves = torch.arange(-126.5, 127.0, 1.0)
        eighths = torch.arange(1.0, 2.0, 1 / 32)
        host = torch.cat([halves, eighths, -eighths * 2**-7, eighths * 2**7, torch.tensor([limit])])
        host = torch.cat([host.clamp(-limit, limit), torch.zeros(512 - len(host))])
        output = torch.zeros(512, dtype=codes_dtype, device=accelerator.device)
        scales = torch.zeros(1, device=accelerator.device)
        accelerator.kernels.quantise(output, scales, host.to(accelerator.device), 512)
        want = (host.round() if codes_dtype is torch.int8 else host).to(codes_dtype)
        expect_close(scales, torch.ones(1), "Kernels.quantise", "must be exactly 1")
        expect_close(output, want, "Kernels.quantise", "must round to the nearest, ties to even")

    @about("Kernels.quantise")
    @over_codes
    @pytest.mark.parametrize("special", SPECIAL, ids=str)
    def test_quantised_nonfinite_blocks_are_nan(
        self, accelerator: Accelerator, codes_dtype: torch.dtype, special: float
    ) -> None:
        """A NaN or an infinity makes its block, and no other, NaN: the scale and the dequantised values."""
        for place in (0, 255, 256, 600, 999):
            host = torch.ones(1000)
            host[place] = special
            scales, back = _round_trip(accelerator, host, codes_dtype, 256)
            hit = torch.arange(1000) // 256 == place // 256
            wanted_scales = torch.full((4,), 1 / LIMITS[codes_dtype])
            wanted_scales[place // 256] = float("nan")
            expected = "NaN for this block alone"
            expect_close(scales, wanted_scales, "Kernels.quantise", expected, rtol=4 * EPS32)
            want = torch.where(hit, torch.nan, 1.0)
            expect_close(back, want, "Kernels.dequantise", "must be NaN in this block alone", rtol=4 * EPS32)

    @about("Kernels.quantise")
    @over_codes
    def test_quantise_of_very_small_and_very_large_values(
        self, accelerator: Accelerator, codes_dtype: torch.dtype
    ) -> None:
        """Zeros come back as zeros, denormals as almost nothing, and the largest values finite."""
        smallest = SMALLEST_SCALE * LIMITS[codes_dtype]
        for peak, tolerance in ((0.0, 0.0), (1e-44, smallest), (1e-37, smallest), (1e-30, 0), (3e38, 0)):
            host = torch.linspace(-1, 1, 64) * peak
            scales, back = _round_trip(accelerator, host, codes_dtype, 32)
            expect(bool(torch.isfinite(scales).all()), "Kernels.quantise", "must be finite", repr(scales))
            error = (back.cpu().double() - host.double()).abs().max().item()
            bound = tolerance + peak / 15.9
            expect(error <= bound, "Kernels.dequantise", f"must be within {bound} of {peak}", str(error))

    @about("Kernels.dequantise")
    @pytest.mark.parametrize("numel", SIZES)
    @over_codes
    @over_dtypes()
    def test_dequantise(
        self, accelerator: Accelerator, numel: int, codes_dtype: torch.dtype, dtype: torch.dtype
    ) -> None:
        """output = source × scale in fp32, rounded once, for every code; at any alignment."""
        where = "Kernels.dequantise"
        codes = _every_code(codes_dtype).repeat(_ceil(numel, 256))[:numel]
        for block, offset in [(b, o) for b in BLOCKS for o in OFFSETS]:
            scale = torch.rand(_ceil(numel, block), generator=torch.Generator().manual_seed(3)) + 0.1
            source = Guarded(codes, 3 * offset, accelerator.device)
            scales = Guarded(scale, offset // 2, accelerator.device)
            output = Guarded(torch.zeros(numel, dtype=dtype), offset, accelerator.device)
            accelerator.kernels.dequantise(output.view, source.view, scales.view, block)
            want = (codes.float() * scale.repeat_interleave(block)[:numel]).to(dtype)
            expect_close(output.view, want, where, "must be the product rounded once", rtol=EPS32)
            expect_close(source.view, codes, where, "source must not be written")
            output.check(where, "output")

    @about("Kernels.quantise")
    def test_quantise_refuses_what_does_not_fit(self, accelerator: Accelerator) -> None:
        """Blocks that are not a power of two in range, other dtypes and wrong sizes raise ValueError."""
        device, kernels = accelerator.device, accelerator.kernels
        values, scales = torch.ones(100, device=device), torch.ones(2, device=device)
        codes = torch.zeros(100, dtype=torch.int8, device=device)
        misfits: list[tuple[Tensor, Tensor, Tensor, int]] = [
            *((codes, scales, values, block) for block in (0, 1, 16, 48, 8192, -64)),
            (values, scales, values, 64),
            (codes, scales.to(torch.float16), values, 64),
            (codes, scales, codes, 64),
            (codes, scales[:1], values, 64),
            (codes[:-1], scales, values, 64),
            (codes, scales, values.view(10, 10), 64),
        ]
        for output, scale, source, block in misfits:
            what = f"block {block}, {output.dtype}, {tuple(scale.shape)}, {tuple(source.shape)}"
            for name, arguments in (
                ("quantise", (output, scale, source, block)),
                ("dequantise", (source, output, scale, block)),
            ):
                call = partial(getattr(kernels, name), *arguments)
                expect_raises(ValueError, f"Kernels.{name}", f"must refuse {what}", call)

    @about(*(f"Kernels.{name}" for name in NAMES))
    @needs("streams")
    @pytest.mark.parametrize("name", NAMES)
    def test_it_is_queued_on_the_current_stream(self, accelerator: Accelerator, name: str) -> None:
        """Inside `use`, a kernel runs after the work queued there before it, and before later work."""
        values, side = torch.zeros(1024, device=accelerator.device), accelerator.streams.new()
        written_by(name, accelerator.kernels, values)  # whatever a first use costs
        accelerator.streams.synchronize()
        with accelerator.streams.use(side):
            long_work(accelerator, BUSY_SECONDS)
            values.fill_(1.0)
            written = written_by(name, accelerator.kernels, values).clone()
            done = side.record()
        done.synchronize()
        accelerator.streams.synchronize()
        want = written_by(name, Kernels(), torch.ones(1024))
        text = "must be queued on the current stream, inside `use` the one in use"
        expect_close(written, want, f"Kernels.{name}", text, rtol=1e-5)

    @about(*(f"Kernels.{name}" for name in NAMES))
    @pytest.mark.parametrize("name", NAMES)
    def test_no_element_is_too_far_away(self, accelerator: Accelerator, name: str) -> None:
        """With more elements than a grid of 65,535 blocks of 256 has, the last ones are processed too."""
        values = torch.zeros(HUGE, device=accelerator.device)
        values[-TAIL:] = 1.0
        written = written_by(name, accelerator.kernels, values)[-TAIL:]
        want = written_by(name, Kernels(), torch.ones(TAIL))
        expect_close(written, want, f"Kernels.{name}", f"must do all of {HUGE} elements", rtol=1e-5)


class TestKernels(KernelContract):
    pass


def written_by(name: str, kernels: Kernels, values: Tensor) -> Tensor:
    """Return what a kernel computes from `values` (flat fp32): shape (values.numel(),), or (2,) for the norm.

    For the kernels of quantised values, a block holds one value and zeros.
    """
    one = torch.ones((), device=values.device)
    if name == "norm_and_nonfinite":
        return kernels.norm_and_nonfinite([values])
    if name in ("quantise", "dequantise"):
        return _written_in_blocks(name, kernels, values)
    output = torch.zeros_like(values)
    if name in UPDATES:
        moments = [values.clone() for _ in UPDATES[name].moment_names]
        kernels.step(usual_step(name, output, values, *moments, number=one))
    elif name == "scale_cast":
        kernels.scale_cast(output, values, one)
    else:
        kernels.accumulate(output, values)
    return output


def _written_in_blocks(name: str, kernels: Kernels, values: Tensor) -> Tensor:
    codes = torch.zeros(values.numel(), dtype=torch.int8, device=values.device)
    scales = torch.ones(_ceil(values.numel(), BLOCKS[1]), device=values.device)
    if name == "quantise":
        kernels.quantise(codes, scales, values, BLOCKS[1])
        return codes
    output = torch.zeros_like(values)
    kernels.dequantise(output, codes.copy_(values), scales, BLOCKS[1])
    return output


def _ceil(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


@cache
def _uneven(numel: int) -> Tensor:
    """Random values whose magnitude changes from block to block, with a stretch of zeros."""
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    values *= 2.0 ** (torch.arange(numel) // 100 % 7 - 3)
    values[512:1023] = 0
    return values


def _absmax(values: Tensor, block: int) -> Tensor:
    """(ceil(n / block),) float64."""
    rows = _ceil(values.numel(), block)
    padded = torch.zeros(rows * block, dtype=torch.float64)
    padded[: values.numel()] = values.double().abs()
    return padded.view(rows, block).amax(dim=1)


def _every_code(dtype: torch.dtype) -> Tensor:
    """The 256 values of an 8-bit dtype, NaN included."""
    return torch.arange(256, dtype=torch.uint8).view(dtype)


def _expect_quantised(codes: Tensor, scales: Tensor, values: Tensor, block: int, where: str) -> None:
    """Check in float64 that every code is as near to its value as the interface says."""
    scale = scales.cpu().double().repeat_interleave(block)[: values.numel()]
    exact, came = values.double(), codes.cpu().double() * scale
    half_steps = 0.501 * scale
    if codes.dtype is torch.float8_e4m3fn:
        half_steps = 1.001 * torch.maximum(exact.abs() / 16, scale / 1024)
    worst = ((came - exact).abs() - half_steps).max().item() if values.numel() else 0.0
    expect(worst <= 0, where, f"must keep the error of {codes.dtype} (block {block})", f"{worst} above it")


def _round_trip(
    accelerator: Accelerator, host: Tensor, codes_dtype: torch.dtype, block: int
) -> tuple[Tensor, Tensor]:
    """Quantise `host`; return the scales and the dequantised values in fp32."""
    device, kernels = accelerator.device, accelerator.kernels
    codes = torch.zeros(len(host), dtype=codes_dtype, device=device)
    scales = torch.zeros(_ceil(len(host), block), device=device)
    back = torch.zeros(len(host), device=device)
    kernels.quantise(codes, scales, host.to(device), block)
    kernels.dequantise(back, codes, scales, block)
    return scales, back


def _scalar(value: float, device: torch.device) -> Tensor:
    return torch.tensor(float(value), device=device)


def _weights(case: StepCase, device: torch.device) -> Guarded | None:
    before = case.weights()
    return None if before is None else Guarded(before, case.offset, device)


def _expect_state(got: Tensor, want: Tensor, where: str, name: str, case: StepCase) -> None:
    if case.skip:
        expect_close(got, want, where, f"{name} must not change where skip is 1 ({case})")
    elif case.coded and name != "master":
        bound = case.half_steps(name, want) * 1.001 + case.atol
        text = f"{name} must equal float64, rounded to the nearest code ({case})"
        expect(bool(((got - want).abs() <= bound).all()), where, text, str(got))
    elif got.dtype is torch.bfloat16:
        half = torch.finfo(got.dtype).eps / 2
        rtol = (2 if case.settings.get("stochastic") else 1) * half + 1e-5
        expect_close(got, want, where, f"{name} must equal float64, rounded ({case})", rtol, case.atol)
    else:
        expect_close(got, want, where, f"{name} must equal float64 ({case})", rtol=1e-5, atol=case.atol)
