"""Optimizers that run as one kernel call per flat sub-group: which ones, with what state, by which kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from accelz import Kernels
from accelz.dynamic_map import BLOCK
from accelz.updates import REMAINDER, AdamWUpdate, LionUpdate, MomentumUpdate, SgdUpdate, Update
from zero.config.training import Masters, Moments
from zero.errors import OptimizerError
from zero.optimizer.lion import Lion
from zero.tiers.values import Column, at_least_fp32

KernelOptions = Mapping[str, Any]


@dataclass(frozen=True)
class Rule:
    """How a kernel steps one kind of optimizer.

    serves: the optimizers' classes. update: what the kernel takes. settings: makes the update's own settings
    out of a param group's. lacks: options of param groups that the kernel has neither the arithmetic nor the
    state for. kept: the dtype in which moments are kept; None for the masters', uint8 for codes. stochastic:
    whether they are then rounded at random. splits: whether masters of bf16 weights are split.
    """

    serves: tuple[type[Optimizer], ...]
    update: type[Update]
    settings: Callable[[KernelOptions], dict[str, Any]] = field(default=lambda _: {}, repr=False)
    lacks: tuple[str, ...] = ()
    kept: torch.dtype | None = None
    stochastic: bool = False
    splits: bool = False

    @property
    def moments(self) -> tuple[str, ...]:
        """State of one value per element, zero at first, by its names in the optimizer's own state too."""
        return self.update.moment_names

    def keeping(self, moments: Moments, masters: Masters) -> Rule:
        """The same rule, with moments and masters kept as the settings say."""
        stochastic = moments == "bf16_stochastic"
        return replace(self, kept=_KEPT[moments], stochastic=stochastic, splits=masters == "split")

    def master(self, weights: torch.dtype) -> torch.dtype:
        """The dtype in which masters of weights in that dtype are kept, or what they have beside these."""
        splits = self.splits and weights is torch.bfloat16
        return REMAINDER if splits else at_least_fp32(weights)

    @property
    def coded(self) -> bool:
        """Whether moments are kept in 8 bits."""
        return self.kept is torch.uint8

    def columns(self, master: torch.dtype) -> tuple[Column, ...]:
        """What a record has beside a master in that dtype: the moments and, in 8 bits, then their scales."""
        moments = (Column(self.kept or master),) * len(self.moments)
        return moments + (Column(torch.float32, BLOCK),) * len(moments) if self.coded else moments

    @property
    def counts(self) -> bool:
        """Whether that state has a "step"."""
        return self.update.counts

    def fits(self, optimizer: Optimizer) -> bool:
        """Whether the kernel gives what `optimizer` itself would compute."""
        groups = optimizer.param_groups
        return type(optimizer) in self.serves and not any(g[name] for g in groups for name in self.lacks)

    def check(self, group: KernelOptions) -> None:
        """Raise OptimizerError for options of a param group that the kernel lacks; at zero.initialize, where
        it was chosen, no group had them."""
        for name in self.lacks:
            if group[name]:
                raise OptimizerError(
                    f"{name}={group[name]} was set after zero.initialize, when no param_group had it: set it "
                    "before zero.initialize"
                )

    def options(self, group: KernelOptions) -> dict[str, Any]:
        """The update's settings by those of a param group. Raises OptimizerError as `check` does."""
        self.check(group)
        shared = {name: group[name] for name in ("weight_decay", "maximize")}
        return {**self.settings(group), **shared, "lr": float(group["lr"]), "stochastic": self.stochastic}


_KEPT: dict[Moments, torch.dtype | None] = {
    "fp32": None,
    "bf16": torch.bfloat16,
    "bf16_stochastic": torch.bfloat16,
    "8bit": torch.uint8,
}


def _adam(group: KernelOptions) -> dict[str, Any]:
    return {**_betas(group), "eps": group["eps"], "decoupled": bool(group["decoupled_weight_decay"])}


def _momentum(group: KernelOptions) -> dict[str, Any]:
    return {"momentum": float(group["momentum"]), "nesterov": group["nesterov"]}


def _betas(group: KernelOptions) -> dict[str, Any]:
    beta1, beta2 = group["betas"]
    return {"beta1": float(beta1), "beta2": float(beta2)}


RULES = (  # in dampened SGD the first step differs, and no state says which one it is
    Rule((torch.optim.Adam, torch.optim.AdamW), AdamWUpdate, _adam, lacks=("amsgrad",)),
    Rule((torch.optim.SGD,), SgdUpdate, lacks=("momentum", "dampening")),
    Rule((torch.optim.SGD,), MomentumUpdate, _momentum, lacks=("dampening",)),
    Rule((Lion,), LionUpdate, _betas),
)
"""Every optimizer that kernels serve; the first rule that fits one is its."""
SERVED = tuple(dict.fromkeys(kind for rule in RULES for kind in rule.serves))


def take_step(kernels: Kernels, update: Update) -> None:
    """By the backend's kernel; for fp64 masters, which no kernel has to support, by the torch reference."""
    if update.master.dtype is torch.float64:
        update.reference(kernels.chunk)
    else:
        kernels.step(update)


def rule_for(optimizer: Optimizer) -> Rule | None:
    """The rule that gives what `optimizer` itself would compute; None where only the optimizer itself can
    step."""
    groups = optimizer.param_groups
    if is_wrapped(optimizer):
        return None
    if any(g.get("differentiable") or isinstance(g.get("lr"), Tensor) for g in groups):
        return None
    return next((rule for rule in RULES if rule.fits(optimizer)), None)


def is_wrapped(optimizer: Optimizer) -> bool:
    """Whether somebody has replaced the step of this one optimizer. The wrapper that torch's schedulers put
    around it, to count steps, does not matter."""
    step = vars(optimizer).get("step")
    return step is not None and not hasattr(step, "_wrapped_by_lr_sched")
