"""CPU kernels: torch's fused optimizer step, fed with 16-bit gradients piece by piece."""

from __future__ import annotations

import torch
from torch import Tensor

from accelz.kernels import Kernels

FUSED_CHUNK = 1 << 18  # elements whose fp32 gradient (1 MiB) stays in the cache between the cast and the step


class CpuKernels(Kernels):
    """The references on pieces that stay in the L2 cache, so that their passes cost little traffic."""

    chunk = 1 << 15

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
        fused = torch._fused_adamw_ if decoupled else torch._fused_adam_
        ready = grad.dtype is torch.float32 and grad_scale is None
        for part in self._slices(master.numel()):
            gradient = grad[part]
            if not ready:
                gradient = torch.empty_like(gradient, dtype=torch.float32)
                super().scale_cast(gradient, grad[part], grad_scale)
            fused(
                [master[part]],
                [gradient],
                [exp_avg[part]],
                [exp_avg_sq[part]],
                [],
                [step],
                lr=lr,
                beta1=beta1,
                beta2=beta2,
                weight_decay=weight_decay,
                eps=eps,
                amsgrad=False,
                maximize=maximize,
                found_inf=skip,
            )
            if weights is not None:
                weights[part].copy_(master[part])

    @staticmethod
    def _slices(numel: int) -> list[slice]:
        return [slice(i, min(i + FUSED_CHUNK, numel)) for i in range(0, numel, FUSED_CHUNK)]
