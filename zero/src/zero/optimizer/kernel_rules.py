"""Optimizers that run as one kernel call per flat sub-group: which ones, with what state, by which kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from accelz import AdamWUpdate, Kernels, LionUpdate, SgdUpdate, Update
from zero.errors import OptimizerError
from zero.optimizer.lion import Lion

KernelOptions = Mapping[str, Any]


@dataclass(frozen=True)
class Rule:
    """How a kernel steps one kind of optimizer.

    kernel: name of the operation. update: what it takes. moments: state of one value per element, zero at
    first, by its names in the optimizer's own state and in the update. counts: whether that state has a
    "step". options: makes the update's own settings out of a param group's.
    """

    kernel: str
    update: Callable[..., Update]
    moments: tuple[str, ...]
    counts: bool
    options: Callable[[KernelOptions], dict[str, Any]]

    def function(self, kernels: Kernels, dtype: torch.dtype) -> Callable[[Update], None]:
        """The backend's kernel; for fp64 masters, which no kernel has to support, the torch reference."""
        if dtype is torch.float32:
            return cast("Callable[[Update], None]", getattr(kernels, self.kernel))
        return partial(getattr(Kernels, self.kernel), kernels)


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


ADAM = Rule("adamw", AdamWUpdate, ("exp_avg", "exp_avg_sq"), True, _adam)
MOMENTUM = Rule("sgd", SgdUpdate, ("momentum_buffer",), False, _momentum)
SGD = Rule("sgd", SgdUpdate, (), False, _plain)
LION = Rule("lion", LionUpdate, ("exp_avg",), False, _betas)
