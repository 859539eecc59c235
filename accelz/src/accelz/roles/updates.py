"""What the kernels of optimizers take: one step of one flat shard, as one value."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """The operands and settings that the steps of all optimizers share. All tensors are on one device.

    master: (n,) fp32, updated in place (the reference takes fp64 as well).
    grad: (n,) fp32, bf16 or fp16, read only and never widened as a whole.
    maximize: step along the gradient, not against it.
    grad_scale: 0-dim fp32 by which the gradient is multiplied (averaging, unscaling, clipping).
    skip: 0-dim fp32; 1 leaves everything unchanged.
    weights: (n,) 16-bit copy of master, written (on a skipped step they hold that copy already and need not
    be written).
    """

    moment_names: ClassVar[tuple[str, ...]] = ()
    """The fields that hold the optimizer's state."""

    master: Tensor
    grad: Tensor
    lr: float
    weight_decay: float
    maximize: bool = False
    grad_scale: Tensor | None = None
    skip: Tensor | None = None
    weights: Tensor | None = None

    @property
    def moments(self) -> tuple[Tensor, ...]:
        """The optimizer's state that this update has, each (n,) fp32 and updated in place."""
        fields = (getattr(self, name) for name in self.moment_names)
        return tuple(moment for moment in fields if moment is not None)

    def split(self, numel: int) -> Iterator[Self]:
        """Yield the updates of successive `numel` elements, the last one of what is left."""
        flat = {name: getattr(self, name) for name in ("master", "grad", "weights", *self.moment_names)}
        for start in range(0, self.master.numel(), numel):
            part = slice(start, start + numel)
            yield replace(self, **{name: value[part] for name, value in flat.items() if value is not None})

    def gradient(self) -> Tensor:
        """Return the gradient to descend along, scaled and signed, in the master's precision."""
        g = self.grad.to(self.master.dtype)
        g = g if self.grad_scale is None else g * self.grad_scale
        return g.neg() if self.maximize else g

    def write(self, master: Tensor, *moments: Tensor) -> None:
        """Write the new master and moments, unless the step is to be skipped; then the weights."""
        targets = (self.master, *self.moments)
        for target, value in zip(targets, (master, *moments), strict=True):
            target.copy_(value if self.skip is None else torch.where(self.skip.bool(), target, value))
        if self.weights is not None:
            self.weights.copy_(self.master)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamWUpdate(Update):
    """A step of `Kernels.adamw`.

    exp_avg, exp_avg_sq: (n,) fp32, updated in place. step: 0-dim fp32, the number of this step, counted
    from 1. decoupled: weight decay as in AdamW (Loshchilov & Hutter, 2019); False adds it to the gradient, as
    in Adam (Kingma & Ba, 2015).
    """

    moment_names = ("exp_avg", "exp_avg_sq")

    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor
    beta1: float
    beta2: float
    eps: float
    decoupled: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class SgdUpdate(Update):
    """A step of `Kernels.sgd`.

    momentum_buffer: (n,) fp32, updated in place, zero before the first step; None without momentum.
    weight_decay is added to the gradient; momentum and nesterov are those of torch.optim.SGD (Sutskever et
    al., 2013) without dampening.
    """

    moment_names = ("momentum_buffer",)

    momentum_buffer: Tensor | None = None
    momentum: float = 0.0
    nesterov: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class LionUpdate(Update):
    """A step of `Kernels.lion`. exp_avg: (n,) fp32, updated in place. Weight decay is decoupled."""

    moment_names = ("exp_avg",)

    exp_avg: Tensor
    beta1: float
    beta2: float
