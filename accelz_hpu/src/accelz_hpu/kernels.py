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

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from accelz import Kernels
from accelz.updates import AdamWUpdate

OPERATOR = "optimizer_adamw"


class HpuKernels(Kernels):
    """The torch references, and AdamW by the fused operator unless `maximize` or L2 decay is asked for.

    operator: torch.ops.hpu.optimizer_adamw. lazy: its signature differs by mode.
    """

    def __init__(self, operator: Callable[..., Any], lazy: bool) -> None:
        self._operator = operator
        self._lazy = lazy

    def adamw(self, update: AdamWUpdate) -> None:
        if update.maximize or (update.weight_decay and not update.decoupled):
            update.reference(self.chunk)
            return
        c1, c2 = update.bias_corrections()
        neg_step = (c2 / c1 * -update.lr).reshape(1)
        gradient_factor = 1 / c2 if update.grad_scale is None else update.grad_scale / c2
        decay = self._decay(update.decay, neg_step)
        for u in update.chunks(self.chunk):
            g = u.grad.float() * gradient_factor
            w, m, v = u.master.clone(), u.exp_avg / c2, u.exp_avg_sq / (c2 * c2)
            self._operator([g], [w], [m], [v], neg_step, u.beta1, u.beta2, u.eps, *decay)
            u.write(w, m * c2, v * (c2 * c2))

    def _decay(self, factor: float, like: Tensor) -> tuple[float] | tuple[Tensor, bool]:
        """The factor on the weights as the mode's operator takes it."""
        return (factor,) if self._lazy else (torch.full_like(like, factor), factor != 1.0)
