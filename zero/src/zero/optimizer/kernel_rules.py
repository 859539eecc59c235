"""Optimizers that run as one kernel call per flat sub-group: which ones, with what state, by which kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from accelz import Kernels
from accelz.updates import AdamWUpdate, LionUpdate, MomentumUpdate, SgdUpdate, Update
from zero.errors import OptimizerError
from zero.optimizer.lion import Lion

KernelOptions = Mapping[str, Any]


@dataclass(frozen=True)
class Rule:
    """How a kernel steps one kind of optimizer.

    update: what it takes. options: makes the update's own settings out of a param group's.
    """

    update: type[Update]
    options: Callable[[KernelOptions], dict[str, Any]]

    @property
    def moments(self) -> tuple[str, ...]:
        """State of one value per element, zero at first, by its names in the optimizer's own state too."""
        return self.update.moment_names

    @property
    def counts(self) -> bool:
        """Whether that state has a "step"."""
        return self.update.counts


def take_step(kernels: Kernels, update: Update) -> None:
    """By the backend's kernel; for fp64 masters, which no kernel has to support, by the torch reference."""
    if update.master.dtype is torch.float32:
        kernels.step(update)
    else:
        update.reference(kernels.chunk)


def rule_for(optimizer: Optimizer) -> Rule | None:
    """The rule that gives what `optimizer` itself would compute; None where only the optimizer itself can
    step."""
    groups = optimizer.param_groups
    if is_wrapped(optimizer):
        return None
    if any(g.get("differentiable") or isinstance(g.get("lr"), Tensor) for g in groups):
        return None
    if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW):
        return None if any(g["amsgrad"] for g in groups) else ADAM
    if type(optimizer) is torch.optim.SGD:
        if any(g["dampening"] for g in groups):  # the first step differs, and no state says which one it is
            return None
        return MOMENTUM if any(g["momentum"] for g in groups) else SGD
    return LION if type(optimizer) is Lion else None


def is_wrapped(optimizer: Optimizer) -> bool:
    """Whether somebody has replaced the step of this one optimizer. The wrapper that torch's schedulers put
    around it, to count steps, does not matter."""
    step = vars(optimizer).get("step")
    return step is not None and not hasattr(step, "_wrapped_by_lr_sched")


def _adam(group: KernelOptions) -> dict[str, Any]:
    _refuse_late(group, "amsgrad")
    return {**_betas(group), "eps": group["eps"], "decoupled": bool(group["decoupled_weight_decay"])}


def _momentum(group: KernelOptions) -> dict[str, Any]:
    _refuse_late(group, "dampening")
    return {"momentum": float(group["momentum"]), "nesterov": group["nesterov"]}


def _plain(group: KernelOptions) -> dict[str, Any]:
    _refuse_late(group, "momentum", "dampening")
    return {}


def _refuse_late(group: KernelOptions, *names: str) -> None:
    """Refuse options that no group had at zero.initialize: the kernel chosen there has neither the arithmetic
    nor the state for them."""
    for name in names:
        if group[name]:
            raise OptimizerError(
                f"{name}={group[name]} was set after zero.initialize, when no param_group had it: set it "
                "before zero.initialize"
            )


def _betas(group: KernelOptions) -> dict[str, Any]:
    beta1, beta2 = group["betas"]
    return {"beta1": float(beta1), "beta2": float(beta2)}


ADAM = Rule(AdamWUpdate, _adam)
MOMENTUM = Rule(MomentumUpdate, _momentum)
SGD = Rule(SgdUpdate, _plain)
LION = Rule(LionUpdate, _betas)
