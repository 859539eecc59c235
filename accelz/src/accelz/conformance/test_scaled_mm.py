"""Products of codes in 8 bits with scales: what layers trained in float8 multiply, forward and backward."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from accelz.accelerator import Accelerator
from accelz.capabilities import Scaling
from accelz.conformance.contract import expect
from accelz.conformance.marks import about, proves, scaled_mm_name
from accelz.conformance.operators import operator

WHERE = "torch._scaled_mm"
ROWS, INNER, COLUMNS = 32, 48, 16
"""Multiples of 16, as matrix units ask for."""
BOUND = 2.0**-7
"""What an element may differ by, relative to the sum of the magnitudes that are added up in it: wide enough
for results in bf16 and for units that add in fewer bits than fp32, far below a scale that is not applied."""
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, FP32 = torch.bfloat16, torch.float32
GRADIENT_OF_ROWS, GRADIENT_OF_COLUMNS = (E5M2, E4M3), (E4M3, E5M2)


def _scaled(how: Scaling) -> Any:
    return pytest.param(how, marks=proves(scaled_mm_name(how)), id=how)


def _case(
    how: Scaling, operands: tuple[torch.dtype, torch.dtype], out: torch.dtype, bias: bool = False
) -> Any:
    named = [str(dtype).removeprefix("torch.").removeprefix("float8_") for dtype in (*operands, out)]
    title = f"{how}, {named[0]} by {named[1]}, {named[2]}{', bias' if bias else ''}"
    return pytest.param(how, operands, out, bias, marks=proves(scaled_mm_name(how)), id=title)


PRODUCTS = [
    _case("tensorwise", (E4M3, E4M3), BF16),
    _case("tensorwise", (E4M3, E4M3), FP32),
    _case("tensorwise", (E4M3, E4M3), BF16, bias=True),
    _case("tensorwise", GRADIENT_OF_ROWS, BF16),
    _case("tensorwise", GRADIENT_OF_ROWS, FP32),
    _case("tensorwise", GRADIENT_OF_COLUMNS, BF16),
    _case("tensorwise", GRADIENT_OF_COLUMNS, FP32),
    _case("rowwise", (E4M3, E4M3), BF16),
    _case("rowwise", (E4M3, E4M3), BF16, bias=True),
]


class ScaledProductContract:
    @pytest.mark.parametrize("inside", [False, True], ids=["dense", "in larger matrices"])
    @pytest.mark.parametrize(("how", "operands", "out", "bias"), PRODUCTS)
    @about(WHERE)
    def test_products_are_right(
        self,
        accelerator: Accelerator,
        how: Scaling,
        operands: tuple[torch.dtype, torch.dtype],
        out: torch.dtype,
        bias: bool,
        inside: bool,
    ) -> None:
        """A row-major matrix of codes by a column-major one, each with its scales, beside float64."""
        a = _codes(accelerator, (ROWS, INNER), operands[0])
        b = _codes(accelerator, (COLUMNS, INNER), operands[1])
        scale_a, scale_b = _scales(how)
        added = torch.randn(COLUMNS, generator=_generator(4)).to(BF16) if bias else None
        case = f"{how}, {operands[0]} by {operands[1]}, {out}{', with a bias' if bias else ''}"
        with operator(WHERE, f"must run ({case})"):
            there = [_part_of_larger(each) if inside else each for each in (a, b)]
            got = _multiply(accelerator, there[0], there[1].t(), scale_a, scale_b, out, added).cpu()
        terms = [each.cpu().double() * scale.double() for each, scale in ((a, scale_a), (b, scale_b.t()))]
        want = terms[0] @ terms[1].t()
        magnitude = terms[0].abs() @ terms[1].t().abs()
        if added is not None:
            want, magnitude = want + added.double(), magnitude + added.double().abs()
        expect(got.dtype == out, WHERE, f"must give {out} ({case})", str(got.dtype))
        error = ((got.double() - want).abs() / magnitude).max().item()
        came = f"an element is off by {error:.3g} of the sum of its terms' magnitudes, over {BOUND:.3g}"
        expect(error <= BOUND, WHERE, f"its result must be right ({case})", came)

    @pytest.mark.parametrize("how", [_scaled("tensorwise"), _scaled("rowwise")])
    @about(WHERE)
    def test_what_is_not_finite_shows(self, accelerator: Accelerator, how: Scaling) -> None:
        """NaN reaches its row and no other; a result beyond its dtype is infinite, not the largest number."""
        a, b = (_codes(accelerator, (rows, INNER), E4M3) for rows in (ROWS, COLUMNS))
        scale_a, scale_b = _scales(how)
        a[3, 5] = math.nan
        with operator(WHERE, f"must run ({how})"):
            got = _multiply(accelerator, a, b.t(), scale_a, scale_b, BF16).cpu()
        rows = got.isnan().any(1).nonzero().flatten().tolist()
        right = rows == [3] and bool(got[3].isnan().all())
        expect(right, WHERE, f"NaN in row 3 must make all of row 3 NaN ({how})", f"NaN in rows {rows}")
        large = torch.full((ROWS, INNER), torch.finfo(E4M3).max).to(accelerator.device).to(E4M3)
        with operator(WHERE, f"must run ({how})"):
            factor = torch.full_like(scale_a, 1e36)
            got = _multiply(accelerator, large, large[:COLUMNS].t(), factor, scale_b, BF16).cpu()
        came = f"{got[0, 0].item():g}"
        expect(bool(got.isposinf().all()), WHERE, f"what overflows must be infinite ({how})", came)

    @pytest.mark.parametrize("dtype", [FP32, BF16], ids=["float32", "bfloat16"])
    @proves(scaled_mm_name("tensorwise"))
    @about("torch.Tensor.to")
    def test_codes_are_those_of_the_host(self, accelerator: Accelerator, dtype: torch.dtype) -> None:
        """Casts of numbers in range to 8 bits round as on the host, bit for bit; NaN stays NaN."""
        for code in (E4M3, E5M2):
            values = torch.randn(4096, generator=_generator(5)) * torch.logspace(-3, 2, 4096)
            values = values.clamp(-448, 448).to(dtype)
            values[7] = math.nan
            expected = f"{dtype} to {code} must round to the nearest, ties to even"
            with operator("torch.Tensor.to", expected):
                got = values.to(accelerator.device).to(code).cpu()
            want = values.to(code)
            wrong = (got.view(torch.uint8) != want.view(torch.uint8)) & ~(got.isnan() & want.isnan())
            at = int(wrong.float().argmax())
            came = f"{int(wrong.sum())} of 4096: {values[at].item()!r} became {got[at].float().item()!r}"
            expect(not wrong.any(), "torch.Tensor.to", expected, came)


class TestScaledProducts(ScaledProductContract):
    pass


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _codes(accelerator: Accelerator, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Random codes on the device, more of them above 0 than below."""
    return (torch.randn(shape, generator=_generator(shape[0])) + 1).to(accelerator.device).to(dtype)


def _part_of_larger(codes: Tensor) -> Tensor:
    """The same codes in a matrix that has more columns, as a part of a whole weight has."""
    return torch.cat([codes.view(torch.uint8)] * 2, 1).view(codes.dtype)[:, : codes.shape[1]]


def _scales(how: Scaling) -> tuple[Tensor, Tensor]:
    """fp32 scales of the operands, on the host, of which no two are alike."""
    if how == "tensorwise":
        return torch.tensor(0.37), torch.tensor(2.9)
    return torch.logspace(-2, 2, ROWS)[:, None], torch.logspace(3, -1, COLUMNS)[None]


def _multiply(
    accelerator: Accelerator,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    out: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    device = accelerator.device
    options: Any = {} if bias is None else {"bias": bias.to(device)}
    return torch._scaled_mm(a, b, scale_a.to(device), scale_b.to(device), out_dtype=out, **options)
