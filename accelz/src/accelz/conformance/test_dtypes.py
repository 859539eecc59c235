"""The floating-point types that a backend declares."""

from __future__ import annotations

import time

import pytest
import torch

from accelz.accelerator import Accelerator
from accelz.conformance.contract import expect, expect_close, named
from accelz.conformance.marks import FLOATS, about, dtype_name, proves

WIDTH, PRODUCTS, ROUNDS = 1024, 4, 3
FP32_BOUND = 8 * torch.finfo(torch.float32).eps


class DtypeContract:
    @pytest.mark.parametrize(
        "dtype",
        [pytest.param(d, id=str(d).removeprefix("torch."), marks=proves(dtype_name(d))) for d in FLOATS],
    )
    @about("Capabilities.dtypes")
    def test_matrix_products_and_kernels(self, accelerator: Accelerator, dtype: torch.dtype) -> None:
        """A declared dtype works in a matrix product, its gradient, and the flat-buffer kernels."""
        self.check(accelerator, dtype)

    @about("Capabilities.dtypes")
    def test_further_dtypes(self, request: pytest.FixtureRequest, accelerator: Accelerator) -> None:
        """Declared dtypes beyond the usual ones work as well."""
        further = sorted(accelerator.capabilities.dtypes - set(FLOATS), key=str)
        if not further:
            pytest.skip("no further dtype is declared")
        for dtype in further:
            request.node.add_marker(proves(dtype_name(dtype)))
        for dtype in further:
            with named("Capabilities.dtypes", f"{dtype} is declared and must work in a matrix product"):
                self.check(accelerator, dtype)

    @about("Capabilities.peak_flops")
    def test_products_are_no_faster_than_the_peak(self, accelerator: Accelerator) -> None:
        """A matrix product does fewer operations in a second than are declared as the device's peak."""
        peak = accelerator.capabilities.peak_flops
        if peak == 0:
            pytest.skip("peak_flops is not declared")
        where, do = "Capabilities.peak_flops", "declare what the data sheet says of dense products in 16 bits"
        expect(isinstance(peak, (int, float)) and peak > 0, where, "must be above 0", repr(peak), do)
        narrow = torch.bfloat16 in accelerator.capabilities.dtypes
        reached = _flops(accelerator, torch.bfloat16 if narrow else torch.float32)
        expect(reached <= peak, where, f"products must not exceed {peak:g}", f"{reached:g} in a second", do)

    def check(self, accelerator: Accelerator, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        host_a, host_b = torch.rand(7, 5, dtype=torch.float64), torch.rand(5, 3, dtype=torch.float64)
        a = host_a.to(accelerator.device, dtype).requires_grad_()
        b = host_b.to(accelerator.device, dtype)
        product = a @ b
        product.sum().backward()
        bound = 8 * torch.finfo(dtype).eps
        where = f"torch.matmul in {dtype}"
        expect(product.dtype == dtype, where, f"must stay {dtype}", str(product.dtype))
        expect_close(product, host_a @ host_b, where, "must be right", rtol=bound)
        want = host_b.sum(1).expand(7, 5)
        assert a.grad is not None
        expect_close(a.grad, want, where, "its gradient must be right", rtol=bound)
        squares = accelerator.kernels.norm_and_nonfinite([a.detach().flatten()])
        expect_close(
            squares[0],
            host_a.square().sum(),
            "Kernels.norm_and_nonfinite",
            "must be right in " + str(dtype),
            rtol=4 * max(bound, FP32_BOUND),
        )


class TestDtypes(DtypeContract):
    pass


def _flops(accelerator: Accelerator, dtype: torch.dtype) -> float:
    """The operations in a second of the fastest of a few rounds of matrix products."""
    matrix = torch.full((WIDTH, WIDTH), 1 / WIDTH, device=accelerator.device, dtype=dtype)
    seconds = []
    for _ in range(ROUNDS):
        accelerator.streams.synchronize()
        started = time.perf_counter()
        for _ in range(PRODUCTS):
            _ = matrix @ matrix
        accelerator.flush()
        accelerator.streams.synchronize()
        seconds.append(time.perf_counter() - started)
    return 2 * WIDTH**3 * PRODUCTS / min(seconds)
