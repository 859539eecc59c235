"""AdamW by the vendor's fused operator, the one behind `hpex.optimizers.FusedAdamW`.

With m and v the new moments, the operator computes in place

    w ← w·d + s·m / (√v + ε)          d: weight_decay, s: neg_step, a one-element tensor on the device

while AdamW is w·d - lr/c1·m / (√v/c2 + ε), where c1 = 1 - β1^t and c2 = √(1 - β2^t): there, ε is added to
the corrected moment. Applied to m/c2, v/c2² and g/c2, with s = -lr·c2/c1, the operator computes exactly that.
c1 and c2 are computed from `step` and stay on the device.

The operands are copies, one chunk at a time. So a step can be skipped without asking the host, and the kernel
also works in lazy mode, which does not write moments through to the tensors that they are views of.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from accelz.kernels import Kernels

OPERATOR = "optimizer_adamw"


class HpuKernels(Kernels):
    """The torch references, and AdamW by the fused operator unless `maximize` or L2 decay is asked for.

    operator: torch.ops.hpu.optimizer_adamw. lazy: its signature differs by mode.
    """

    def __init__(self, operator: Callable[..., Any], lazy: bool) -> None:
        self._operator = operator
        self._lazy = lazy

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
        if maximize or (weight_decay and not decoupled):
            super().adamw(
                master, grad, exp_avg, exp_avg_sq, step, lr=lr, beta1=beta1, beta2=beta2, eps=eps,
                weight_decay=weight_decay, decoupled=decoupled, maximize=maximize, grad_scale=grad_scale,
                skip=skip, weights=weights,
            )  # fmt: skip
            return
        c2 = _bias_correction(beta2, step).sqrt()
        neg_step = (c2 / _bias_correction(beta1, step) * -lr).reshape(1)
        gradient_factor = 1 / c2 if grad_scale is None else grad_scale / c2
        hyper = (neg_step, beta1, beta2, eps, *self._decay(1 - lr * weight_decay, neg_step))
        for part in self._parts(master.numel()):
            g = grad[part].float() * gradient_factor
            w, m, v = master[part].clone(), exp_avg[part] / c2, exp_avg_sq[part] / (c2 * c2)
            self._operator([g], [w], [m], [v], *hyper)
            for old, value in ((master, w), (exp_avg, m * c2), (exp_avg_sq, v * (c2 * c2))):
                old[part].copy_(value if skip is None else torch.where(skip.bool(), old[part], value))
            if weights is not None:
                weights[part].copy_(master[part])

    def _decay(self, factor: float, like: Tensor) -> tuple[float] | tuple[Tensor, bool]:
        """The factor on the weights as the mode's operator takes it."""
        return (factor,) if self._lazy else (torch.full_like(like, factor), factor != 1.0)


def _bias_correction(beta: float, step: Tensor) -> Tensor:
    """1 - beta ** step, accurate in fp32 and without waiting for the device."""
    return -torch.expm1(step * (math.log(beta) if beta > 0 else -math.inf))
