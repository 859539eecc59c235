"""Lies of the kernels role."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from accelz import (
    Kernels,
)
from accelz.updates import AdamWUpdate, LionUpdate, MomentumUpdate, Update
from accelz_cpu.kernels import CpuKernels

from .kept import keep


class StepCounted(CpuKernels):
    def step(self, update: Update) -> None:
        super().step(update)
        if update.step is not None:
            update.step.add_(1)


class OverflowMissed(CpuKernels):
    def norm_and_nonfinite(self, tensors: Any) -> Tensor:
        result = super().norm_and_nonfinite(tensors)
        result[1] = float(any(not torch.isfinite(t).all() for t in tensors))
        return result


class KernelRaises(CpuKernels):
    def scale_cast(self, output: Tensor, source: Tensor, scale: Tensor | None = None) -> None:
        raise RuntimeError("no kernel image for this device")


class NormIsATuple(CpuKernels):
    def norm_and_nonfinite(self, tensors: Any) -> Tensor:
        return tuple(super().norm_and_nonfinite(tensors).tolist())  # type: ignore[return-value]


class ScratchKept(CpuKernels):
    def step(self, update: Update) -> None:
        super().step(dataclasses.replace(update, grad=keep(update.grad.clone())))


class SkipIgnored(CpuKernels):
    def step(self, update: Update) -> None:
        super().step(dataclasses.replace(update, skip=None))


class TailOverrun(CpuKernels):
    """Writes whole vectors of four, past the end of an odd shard."""

    def accumulate(self, total: Tensor, addend: Tensor) -> None:
        super().accumulate(total, addend)
        n = total.numel()
        whole = torch.as_strided(total, (n + -n % 4,), (1,))
        whole[n:] += 1


class NonfiniteMissed(CpuKernels):
    def norm_and_nonfinite(self, tensors: Any) -> Tensor:
        return super().norm_and_nonfinite([t.nan_to_num(0, 0, 0) for t in tensors])


class WeightsForgotten(CpuKernels):
    def step(self, update: Update) -> None:
        super().step(dataclasses.replace(update, weights=None))


class BetaForgotten(CpuKernels):
    def step(self, update: Update) -> None:
        if isinstance(update, AdamWUpdate):
            update = dataclasses.replace(update, beta2=0.999)
        super().step(update)


class RateForgotten(CpuKernels):
    def step(self, update: Update) -> None:
        own = isinstance(update, LionUpdate)
        super().step(dataclasses.replace(update, lr=1e-2) if own else update)


class RemaindersForgotten(CpuKernels):
    """Masters are stepped as if they had no more bits than the weights."""

    def step(self, update: Update) -> None:
        super().step(update)
        if update.is_split:
            update.master.zero_()


class RatesForgotten(Kernels):
    """A replay has the learning rate of the capture."""

    def step(self, update: Update) -> None:
        super().step(dataclasses.replace(update, rates=None))


class HalfWeightsForgotten(CpuKernels):
    def step(self, update: Update) -> None:
        half = update.weights is not None and update.weights.dtype is torch.float16
        own = isinstance(update, MomentumUpdate)
        super().step(dataclasses.replace(update, weights=None) if half and own else update)


class ShortTable(CpuKernels):
    def norm_and_nonfinite(self, tensors: Any) -> Tensor:
        return super().norm_and_nonfinite(list(tensors)[:110])


class SmallGrid(CpuKernels):
    """One thread an element, and no more than 65,535 blocks of 256."""

    def dequantise(self, output: Tensor, source: Tensor, *args: Any) -> None:
        super().dequantise(output, source, *args)
        output[65_535 * 256 :] = 0


class Saturating(CpuKernels):
    """Casts and sums as conversion instructions do them: no infinity, and NaN is 0."""

    def scale_cast(self, output: Tensor, *args: Any) -> None:
        super().scale_cast(output, *args)
        output.nan_to_num_()

    def accumulate(self, total: Tensor, addend: Tensor) -> None:
        super().accumulate(total, addend)
        total.nan_to_num_()


class KernelsOnTheFirstStream(Kernels):
    def accumulate(self, total: Tensor, addend: Tensor) -> None:
        with torch.Stream(stream_id=0, device_index=total.device.index, device_type=20):
            super().accumulate(total, addend)


class SixteenBitScale(CpuKernels):
    def scale_cast(self, output: Tensor, source: Tensor, scale: Tensor | None = None) -> None:
        output.copy_(source if scale is None else source.bfloat16() * scale)
