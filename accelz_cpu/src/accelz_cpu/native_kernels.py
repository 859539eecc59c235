"""Kernels of the native library: one pass over memory each, on as many threads as torch may use.

adamw, scale_cast and accumulate compute every element by itself, with no fused operations: results are the
same bits for any number of threads, any slicing and any instruction set. The norm adds up in an order that
depends on the length alone. From the torch reference adamw differs by a few units in the last place of fp32
(the bias corrections are computed in fp64 here), the others not at all but for the norm's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import CDLL, byref

import torch
from torch import Tensor

from accelz_cpu.kernels import CpuKernels
from accelz_cpu.native import DTYPES, FLOATS, AdamWArguments


class NativeKernels(CpuKernels):
    """What the library has no code for (fp64, tensors that are not contiguous) goes to the torch versions."""

    def __init__(self, library: CDLL) -> None:
        self._library = library

    def adamw(
        self,
        master: Tensor,
        grad: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        step: Tensor,
        *,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        decoupled: bool = True,
        maximize: bool = False,
        grad_scale: Tensor | None = None,
        skip: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> None:
        state = (master, exp_avg, exp_avg_sq)
        scalars = (step, grad_scale, skip)
        wide = all(t is None or t.dtype is torch.float32 for t in (*state, *scalars))
        if (
            not wide
            or not _flat(*state, grad, weights)
            or any(s is not None and not s.is_cpu for s in scalars)
        ):
            super().adamw(
                master,
                grad,
                exp_avg,
                exp_avg_sq,
                step,
                lr=lr,
                beta1=beta1,
                beta2=beta2,
                eps=eps,
                weight_decay=weight_decay,
                decoupled=decoupled,
                maximize=maximize,
                grad_scale=grad_scale,
                skip=skip,
                weights=weights,
            )
            return
        arguments = AdamWArguments(
            *(_pointer(t) for t in (*state, grad, weights, *scalars)),
            _same_length(*state, grad, weights),
            DTYPES[grad.dtype],
            0 if weights is None else DTYPES[weights.dtype],
            decoupled,
            maximize,
            lr,
            beta1,
            beta2,
            eps,
            weight_decay,
        )
        self._library.accelz_adamw(byref(arguments), torch.get_num_threads())

    def norm_and_nonfinite(self, tensors: Sequence[Tensor]) -> Tensor:
        if not _flat(*tensors):
            return super().norm_and_nonfinite(tensors)
        threads = torch.get_num_threads()
        squares = self._library.accelz_sum_of_squares
        total = sum(squares(t.data_ptr(), DTYPES[t.dtype], t.numel(), threads) for t in tensors)
        rounded = torch.tensor(total, dtype=torch.float64).float()
        return torch.stack((rounded, (~torch.isfinite(rounded)).float()))

    def scale_cast(self, output: Tensor, source: Tensor, scale: Tensor | None = None) -> None:
        if not _flat(output, source) or (scale is not None and scale.dtype is not torch.float32):
            super().scale_cast(output, source, scale)
            return
        self._library.accelz_scale_cast(
            output.data_ptr(),
            DTYPES[output.dtype],
            source.data_ptr(),
            DTYPES[source.dtype],
            _pointer(scale),
            _same_length(output, source),
            torch.get_num_threads(),
        )

    def accumulate(self, total: Tensor, addend: Tensor) -> None:
        if not _flat(total, addend):
            super().accumulate(total, addend)
            return
        self._library.accelz_accumulate(
            total.data_ptr(),
            DTYPES[total.dtype],
            addend.data_ptr(),
            DTYPES[addend.dtype],
            _same_length(total, addend),
            torch.get_num_threads(),
        )


def _flat(*tensors: Tensor | None) -> bool:
    """Whether the library takes them: dense host memory, of a dtype that it knows."""
    return all(t is None or (t.dtype in FLOATS and t.is_cpu and t.is_contiguous()) for t in tensors)


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _same_length(*tensors: Tensor | None) -> int:
    lengths = {t.numel() for t in tensors if t is not None}
    if len(lengths) != 1:
        raise ValueError(f"expected tensors of one length, got {sorted(lengths)} elements")
    return lengths.pop()
