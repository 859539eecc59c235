"""Kernels of the native library: one pass over memory each, on as many threads as torch may use.

All kernels but the norm compute each element by itself and fuse no operations, so results are the same bits
for any number of threads, any slicing and any instruction set. The norm adds in an order that depends only on
the length. adamw, sgd and lion differ from the torch reference by a few units in the last place of fp32,
because torch fuses some operations, and adamw's bias corrections are computed in fp64 here. Where lion's
direction is that close to zero, its sign may differ. The other kernels give the reference's bits, except that
the norm adds in another order.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import CDLL, byref

import torch
from torch import Tensor

from accelz.kernels import check_blocks
from accelz_cpu.kernels import CpuKernels
from accelz_cpu.native import (
    CODES,
    DTYPES,
    FLOATS,
    AdamWArguments,
    LionArguments,
    SgdArguments,
    StepArguments,
)


class NativeKernels(CpuKernels):
    """The library's kernels. What it has no code for (fp64, strided tensors) goes to the torch versions."""

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
        common = _step_arguments(
            master, grad, (exp_avg, exp_avg_sq), grad_scale, skip, weights, lr, weight_decay, maximize
        )
        if common is None or not _one_value(step):
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
        pointers = (exp_avg.data_ptr(), exp_avg_sq.data_ptr(), step.data_ptr())
        arguments = AdamWArguments(common, *pointers, decoupled, beta1, beta2, eps)
        self._library.accelz_adamw(byref(arguments), torch.get_num_threads())

    def sgd(
        self,
        master: Tensor,
        grad: Tensor,
        momentum_buffer: Tensor | None,
        *,
        lr: float,
        momentum: float,
        weight_decay: float,
        nesterov: bool = False,
        maximize: bool = False,
        grad_scale: Tensor | None = None,
        skip: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> None:
        moments = () if momentum_buffer is None else (momentum_buffer,)
        common = _step_arguments(master, grad, moments, grad_scale, skip, weights, lr, weight_decay, maximize)
        if common is None:
            super().sgd(
                master,
                grad,
                momentum_buffer,
                lr=lr,
                momentum=momentum,
                weight_decay=weight_decay,
                nesterov=nesterov,
                maximize=maximize,
                grad_scale=grad_scale,
                skip=skip,
                weights=weights,
            )
            return
        arguments = SgdArguments(common, _pointer(momentum_buffer), nesterov, momentum)
        self._library.accelz_sgd(byref(arguments), torch.get_num_threads())

    def lion(
        self,
        master: Tensor,
        grad: Tensor,
        exp_avg: Tensor,
        *,
        lr: float,
        beta1: float,
        beta2: float,
        weight_decay: float,
        maximize: bool = False,
        grad_scale: Tensor | None = None,
        skip: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> None:
        common = _step_arguments(
            master, grad, (exp_avg,), grad_scale, skip, weights, lr, weight_decay, maximize
        )
        if common is None:
            super().lion(
                master,
                grad,
                exp_avg,
                lr=lr,
                beta1=beta1,
                beta2=beta2,
                weight_decay=weight_decay,
                maximize=maximize,
                grad_scale=grad_scale,
                skip=skip,
                weights=weights,
            )
            return
        arguments = LionArguments(common, exp_avg.data_ptr(), beta1, beta2)
        self._library.accelz_lion(byref(arguments), torch.get_num_threads())

    def norm_and_nonfinite(self, tensors: Sequence[Tensor]) -> Tensor:
        if not _flat(*tensors):
            return super().norm_and_nonfinite(tensors)
        threads = torch.get_num_threads()
        squares = self._library.accelz_sum_of_squares
        total = sum(squares(t.data_ptr(), DTYPES[t.dtype], t.numel(), threads) for t in tensors)
        rounded = torch.tensor(total, dtype=torch.float64, device="cpu").float()
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

    def quantise(self, output: Tensor, scales: Tensor, source: Tensor, block: int) -> None:
        check_blocks(output, scales, source, block)
        if not (_flat(source, scales) and _dense(output)):
            super().quantise(output, scales, source, block)
            return
        self._library.accelz_quantise(
            output.data_ptr(),
            CODES[output.dtype],
            scales.data_ptr(),
            source.data_ptr(),
            DTYPES[source.dtype],
            source.numel(),
            block,
            torch.get_num_threads(),
        )

    def dequantise(self, output: Tensor, source: Tensor, scales: Tensor, block: int) -> None:
        check_blocks(source, scales, output, block)
        if not (_flat(output, scales) and _dense(source)):
            super().dequantise(output, source, scales, block)
            return
        self._library.accelz_dequantise(
            output.data_ptr(),
            DTYPES[output.dtype],
            source.data_ptr(),
            CODES[source.dtype],
            scales.data_ptr(),
            source.numel(),
            block,
            torch.get_num_threads(),
        )


def _step_arguments(
    master: Tensor,
    grad: Tensor,
    moments: tuple[Tensor, ...],
    grad_scale: Tensor | None,
    skip: Tensor | None,
    weights: Tensor | None,
    lr: float,
    weight_decay: float,
    maximize: bool,
) -> StepArguments | None:
    """Return what all optimizer steps take, or None if the library does not take these tensors."""
    wide = all(t.dtype is torch.float32 for t in (master, *moments))
    if not wide or not _flat(master, grad, *moments, weights) or not _one_value(grad_scale, skip):
        return None
    return StepArguments(
        *(_pointer(t) for t in (master, grad, weights, grad_scale, skip)),
        _same_length(master, grad, *moments, weights),
        DTYPES[grad.dtype],
        0 if weights is None else DTYPES[weights.dtype],
        maximize,
        lr,
        weight_decay,
    )


def _one_value(*scalars: Tensor | None) -> bool:
    """Whether the library can read the scalars: they must be fp32 in host memory."""
    return all(s is None or (s.dtype is torch.float32 and s.is_cpu) for s in scalars)


def _flat(*tensors: Tensor | None) -> bool:
    """Whether the library takes the tensors: they must be dense, in host memory and of a dtype it knows."""
    return all(t is None or (t.dtype in FLOATS and _dense(t)) for t in tensors)


def _dense(tensor: Tensor) -> bool:
    return tensor.is_cpu and tensor.is_contiguous()


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _same_length(*tensors: Tensor | None) -> int:
    lengths = {t.numel() for t in tensors if t is not None}
    if len(lengths) != 1:
        raise ValueError(f"expected tensors of one length, got {sorted(lengths)} elements")
    return lengths.pop()
