"""Kernels of the native library: one pass over memory each, on as many threads as torch may use.

All kernels but the norm compute each element by itself and fuse no operations, so results are the same bits
for any number of threads, any slicing and any instruction set. The norm adds in an order that depends only on
the length. Steps of optimizers differ from the torch reference by a few units in the last place of fp32,
because torch fuses some operations, and adamw's bias corrections are computed in fp64 here. Where lion's
direction is that close to zero, its sign may differ. The other kernels give the reference's bits, except that
the norm adds in another order.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import CDLL, byref
from itertools import count, takewhile

import torch
from torch import Tensor

from accelz import check_blocks
from accelz.updates import REMAINDER, Update
from accelz_cpu.kernels import CpuKernels
from accelz_cpu.native import CODES, DTYPES, FLOATS, NativeUpdate


class NativeKernels(CpuKernels):
    """The library's kernels. What it has no code for (fp64, strided tensors) goes to the torch versions."""

    def __init__(self, library: CDLL) -> None:
        self._library = library
        names = takewhile(bool, map(library.accelz_optimizer, count()))
        self._optimizers = {name.decode(): number for number, name in enumerate(names)}

    def step(self, update: Update) -> None:
        optimizer, moments = self._optimizers.get(update.kernel), update.moments
        if optimizer is None or not _serves(update, moments):
            super().step(update)
            return
        master = _pointer(update.master)
        native = NativeUpdate(
            *((None, master) if update.is_split else (master, None)),
            _pointer(update.grad),
            tuple(map(_pointer, moments)),
            tuple(map(_pointer, update.scales)),
            *map(_pointer, (update.weights, update.step, update.grad_scale, update.skip)),
            _same_length(update.master, update.grad, update.weights, *moments),
            DTYPES[update.grad.dtype],
            0 if update.weights is None else DTYPES[update.weights.dtype],
            DTYPES[moments[0].dtype] if moments else 0,
            update.stochastic,
            update.lr,
            -1.0 if update.maximize else 1.0,
            update.decay,
            update.l2,
            update.constants,
        )
        self._library.accelz_step(optimizer, byref(native), torch.get_num_threads())

    def origin(self, name: str) -> str:
        own = f"{NativeKernels.__module__}.{NativeKernels.__qualname__}"
        return own if name in self._optimizers else super().origin(name)

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
        if not (_flat(source, scales) and _dense(output) and output.dtype in CODES):
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
        if not (_flat(output, scales) and _dense(source) and source.dtype in CODES):
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


def _serves(update: Update, moments: Sequence[Tensor]) -> bool:
    """Whether the library takes the tensors of a step."""
    return (
        update.master.dtype in (torch.float32, REMAINDER)
        and update.rates is None  # they are for graphs, and the host has none
        and {moment.dtype for moment in moments} in _MOMENTS
        and _flat(update.grad, update.weights, *update.scales)
        and all(map(_dense, (update.master, *moments)))
        and _one_value(update.step, update.grad_scale, update.skip)
    )


_MOMENTS: tuple[set[torch.dtype], ...] = (set(), {torch.float32}, {torch.bfloat16}, {torch.uint8})


def _one_value(*scalars: Tensor | None) -> bool:
    """Whether the library can read the scalars: they must be fp32 in host memory."""
    return all(s is None or (s.dtype is torch.float32 and s.is_cpu) for s in scalars)


def _flat(*tensors: Tensor | None) -> bool:
    """Whether the library takes the tensors: they must be dense, in host memory and of a dtype it knows."""
    return all(t is None or (t.dtype in FLOATS and t.is_cpu and t.is_contiguous()) for t in tensors)


def _dense(tensor: Tensor) -> bool:
    return tensor.is_cpu and tensor.is_contiguous()


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _same_length(*tensors: Tensor | None) -> int:
    lengths = {t.numel() for t in tensors if t is not None}
    if len(lengths) != 1:
        raise ValueError(f"expected tensors of one length, got {sorted(lengths)} elements")
    return lengths.pop()
