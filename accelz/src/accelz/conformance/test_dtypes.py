"""The floating-point types that a backend declares."""

from __future__ import annotations

import pytest
import torch

from accelz.accelerator import Accelerator
from accelz.conformance.contract import expect, expect_close, named
from accelz.conformance.marks import FLOATS, about, dtype_name, proves

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
