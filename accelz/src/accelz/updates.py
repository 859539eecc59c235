"""The optimizers whose steps are kernels: what a step of each one takes, and the step in plain torch.

An optimizer is one class here. Its `kernel` is the name under which a backend may have a kernel of its own,
and `constants` are what such a kernel computes with, in the order in which it takes them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Update(ABC):
    """One step of one flat shard. All tensors are on one device.

    master: (n,) fp32, updated in place (the reference takes fp64 as well).
    grad: (n,) fp32, bf16 or fp16, read only and never widened as a whole.
    maximize: step along the gradient, not against it.
    grad_scale: 0-dim fp32 by which the gradient is multiplied (averaging, unscaling, clipping).
    skip: 0-dim fp32; 1 leaves everything unchanged.
    weights: (n,) 16-bit copy of master, written (on a skipped step they hold that copy already and need not
    be written).
    step: 0-dim fp32, the number of this step, counted from 1; only for optimizers that count.
    """

    kernel: ClassVar[str]
    moment_names: ClassVar[tuple[str, ...]] = ()
    """The fields that hold the optimizer's state, each (n,) fp32 and updated in place."""
    counts: ClassVar[bool] = False
    """Whether a step needs its number."""

    master: Tensor
    grad: Tensor
    lr: float
    weight_decay: float
    maximize: bool = False
    grad_scale: Tensor | None = None
    skip: Tensor | None = None
    weights: Tensor | None = None
    step: Tensor | None = None

    @property
    def decay(self) -> float:
        """The factor on master by which weights decay."""
        return 1.0

    @property
    def l2(self) -> float:
        """The part of master that is added to the gradient, by which weights decay."""
        return self.weight_decay

    @property
    def constants(self) -> tuple[float, ...]:
        """At most 8 numbers that differ from optimizer to optimizer."""
        return ()

    @property
    def moments(self) -> tuple[Tensor, ...]:
        """The optimizer's state, in the order of `moment_names`."""
        return tuple(getattr(self, name) for name in self.moment_names)

    @abstractmethod
    def reference(self, chunk: int) -> None:
        """Make the step in plain torch, `chunk` elements at a time, which bounds its scratch memory."""

    def split(self, numel: int) -> Iterator[Self]:
        """Yield the updates of successive `numel` elements, the last one of what is left."""
        flat = {name: getattr(self, name) for name in ("master", "grad", "weights", *self.moment_names)}
        for start in range(0, self.master.numel(), numel):
            part = slice(start, start + numel)
            yield replace(self, **{name: value[part] for name, value in flat.items() if value is not None})

    def gradient(self) -> Tensor:
        """Return the gradient to descend along: scaled, signed and with `l2`, in the master's precision."""
        g = self.grad.to(self.master.dtype)
        g = g if self.grad_scale is None else g * self.grad_scale
        g = g.neg() if self.maximize else g
        return g.add(self.master, alpha=self.l2) if self.l2 else g

    def write(self, master: Tensor, *moments: Tensor) -> None:
        """Write the new master and moments, unless the step is to be skipped; then the weights."""
        targets = (self.master, *self.moments)
        for target, value in zip(targets, (master, *moments), strict=True):
            target.copy_(value if self.skip is None else torch.where(self.skip.bool(), target, value))
        if self.weights is not None:
            self.weights.copy_(self.master)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamWUpdate(Update):
    """A step of AdamW (Loshchilov & Hutter, 2019), or without `decoupled` of Adam (Kingma & Ba, 2015).

    decoupled: whether weights decay by themselves; else by their part in the gradient.
    """

    kernel = "adamw"
    moment_names = ("exp_avg", "exp_avg_sq")
    counts = True

    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor
    beta1: float
    beta2: float
    eps: float
    decoupled: bool = True

    @property
    def decay(self) -> float:
        return 1 - self.lr * self.weight_decay if self.decoupled else 1.0

    @property
    def l2(self) -> float:
        return 0.0 if self.decoupled else self.weight_decay

    @property
    def constants(self) -> tuple[float, ...]:
        """beta1, 1 - beta1, log(beta1), the same of beta2, eps."""
        betas = (self.beta1, self.beta2)
        return (*(c for beta in betas for c in (beta, 1 - beta, _log(beta))), self.eps)

    def bias_corrections(self) -> tuple[Tensor, Tensor]:
        """1 - beta ** step, accurate in fp32 and without waiting for the device; of beta2, its root."""
        first, second = (-torch.expm1(self.step * _log(beta)) for beta in (self.beta1, self.beta2))
        return first, second.sqrt()

    def reference(self, chunk: int) -> None:
        first, root = self.bias_corrections()
        step_size = self.lr / first
        for u in self.split(chunk):
            g = u.gradient()
            m = torch.lerp(u.exp_avg, g, 1 - u.beta1)
            v = (u.exp_avg_sq * u.beta2).addcmul_(g, g, value=1 - u.beta2)
            u.write((u.master * u.decay).sub_(m / (v.sqrt() / root).add_(u.eps) * step_size), m, v)


@dataclass(frozen=True, kw_only=True, slots=True)
class SgdUpdate(Update):
    """A step of stochastic gradient descent without momentum."""

    kernel = "sgd"

    def reference(self, chunk: int) -> None:
        for u in self.split(chunk):
            u.write(u.master.sub(u.gradient(), alpha=u.lr))


@dataclass(frozen=True, kw_only=True, slots=True)
class MomentumUpdate(Update):
    """A step of torch.optim.SGD with momentum (Sutskever et al., 2013), without dampening.

    momentum_buffer: zero before the first step.
    """

    kernel = "momentum"
    moment_names = ("momentum_buffer",)

    momentum_buffer: Tensor
    momentum: float
    nesterov: bool = False

    @property
    def constants(self) -> tuple[float, ...]:
        """momentum, and 1 with nesterov or 0."""
        return self.momentum, float(self.nesterov)

    def reference(self, chunk: int) -> None:
        for u in self.split(chunk):
            g = u.gradient()
            m = u.momentum_buffer * u.momentum + g
            u.write(u.master.sub(g.add(m, alpha=u.momentum) if u.nesterov else m, alpha=u.lr), m)


@dataclass(frozen=True, kw_only=True, slots=True)
class LionUpdate(Update):
    """A step of Lion (Chen et al., 2023, arXiv:2302.06675): by lr against the sign of
    beta1 × exp_avg + (1 - beta1) × gradient. Weights decay by themselves."""

    kernel = "lion"
    moment_names = ("exp_avg",)

    exp_avg: Tensor
    beta1: float
    beta2: float

    @property
    def decay(self) -> float:
        return 1 - self.lr * self.weight_decay

    @property
    def l2(self) -> float:
        return 0.0

    @property
    def constants(self) -> tuple[float, ...]:
        """1 - beta1, 1 - beta2."""
        return 1 - self.beta1, 1 - self.beta2

    def reference(self, chunk: int) -> None:
        for u in self.split(chunk):
            g = u.gradient()
            direction = torch.lerp(u.exp_avg, g, 1 - u.beta1).sign_()
            new = u.master.mul(u.decay).sub_(direction, alpha=u.lr)
            u.write(new, torch.lerp(u.exp_avg, g, 1 - u.beta2))


UPDATES: dict[str, type[Update]] = {
    kind.kernel: kind for kind in (AdamWUpdate, SgdUpdate, MomentumUpdate, LionUpdate)
}
"""Every optimizer, by the name of its kernel."""


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -math.inf
