"""CPU kernels: torch's fused optimizer step, fed with 16-bit gradients piece by piece."""

from __future__ import annotations

import torch

from accelz import Kernels
from accelz.updates import AdamWUpdate

FUSED_CHUNK = 1 << 18  # elements whose fp32 gradient (1 MiB) stays in the cache between the cast and the step


class CpuKernels(Kernels):
    """The references on pieces that stay in the L2 cache, so that their passes cost little traffic."""

    chunk = 1 << 15

    def adamw(self, update: AdamWUpdate) -> None:
        fused = torch._fused_adamw_ if update.decoupled else torch._fused_adam_
        ready = update.grad.dtype is torch.float32 and update.grad_scale is None
        for u in update.chunks(FUSED_CHUNK):
            gradient = u.grad
            if not ready:
                gradient = torch.empty_like(gradient, dtype=torch.float32)
                super().scale_cast(gradient, u.grad, u.grad_scale)
            fused(
                [u.master],
                [gradient],
                [u.exp_avg],
                [u.exp_avg_sq],
                [],
                [u.step],
                lr=u.lr,
                beta1=u.beta1,
                beta2=u.beta2,
                weight_decay=u.weight_decay,
                eps=u.eps,
                amsgrad=False,
                maximize=u.maximize,
                found_inf=u.skip,
            )
            if u.weights is not None:
                u.weights.copy_(u.master)
