"""Kernels of the device: AdamW and SGD in one piece where everything is fp32, else the references."""

from __future__ import annotations

import math

import torch
from accelz.kernels import Kernels
from torch import Tensor


class OldKernels(Kernels):
    chunk = 1 << 16

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
        plain = grad.dtype is torch.float32 and skip is None and decoupled and not maximize
        if not plain or not beta1 or not beta2:
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
        g = grad if grad_scale is None else grad * grad_scale
        exp_avg.lerp_(g, 1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        first, second = (-torch.expm1(step * math.log(beta)) for beta in (beta1, beta2))
        master.mul_(1 - lr * weight_decay)
        master.sub_(exp_avg / (exp_avg_sq.sqrt() / second.sqrt()).add_(eps) * (lr / first))
        if weights is not None:
            weights.copy_(master)

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
        plain = grad.dtype is torch.float32 and skip is None and grad_scale is None and weights is None
        if momentum_buffer is not None or weight_decay or maximize or not plain:
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
        master.sub_(grad, alpha=lr)
