"""What the optimizer object does once an engine has it: `step` and `zero_grad` are the engine's, while state
dicts, copies and further parameters are refused, because it holds one rank's slices only.

The object becomes one of a subclass that bears its class's name, so that everybody who has it, such as
schedulers, drives the engine.
"""

from __future__ import annotations

import types
import weakref
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from zero.errors import OptimizerError, UsageError
from zero.optimizer.shown_state import ShownState

if TYPE_CHECKING:
    from zero.training_pass.boundary import Boundary

_DRIVER, _REPLACED = "_zero_driver", "_zero_replaced_step"


def take_over(optimizer: Optimizer, driver: Boundary) -> None:
    """Make `optimizer.step()` and `zero_grad()` call the driver, which is not held, from now on.

    `optimizer.state_dict()` and `load_state_dict()` raise UsageError before anybody else's hooks on them run;
    likewise `torch.save(optimizer)` and `copy.deepcopy(optimizer)`. `add_param_group()` raises
    OptimizerError.
    """
    own = optimizer.__dict__
    replaced = own.pop("step", None)  # by a scheduler, to see that it was called, or by the program
    if replaced is not None and not hasattr(replaced, "_wrapped_by_lr_sched"):
        own[_REPLACED] = replaced
    own[_DRIVER] = weakref.ref(driver), weakref.ref(optimizer)
    own["_step_supports_amp_scaling"] = False  # of torch's fused kernels, which do not step
    optimizer.__class__ = _driven(type(optimizer))  # type: ignore[arg-type]  # a class is hashable
    optimizer.register_state_dict_pre_hook(_refuse_to_save, prepend=True)
    optimizer.register_load_state_dict_pre_hook(_refuse_to_load, prepend=True)
    own["__getstate__"] = _refuse_to_copy
    own["add_param_group"] = _refuse_to_add


def let_go(optimizer: Optimizer) -> None:
    """Take from an optimizer what it has of a model that another one steps from now on."""
    if isinstance(optimizer.state, ShownState):
        optimizer.state = defaultdict(dict)
    optimizer.state.clear()
    for group in optimizer.param_groups:
        group["params"] = []


def own_step(optimizer: Optimizer) -> Callable[[], Any]:
    """The step that the optimizer had before it was taken over."""
    replaced: Callable[[], Any] | None = vars(optimizer).get(_REPLACED)
    own: Any = type(optimizer).__mro__[1]
    return replaced or own.step.__get__(optimizer)


@cache
def _driven(kind: type[Optimizer]) -> type[Optimizer]:
    """The class of optimizers of this kind that drive an engine."""

    def step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        (driver, optimizer), loss = _driver_of(self), None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        driver.step_of(optimizer)
        return loss

    def zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
        driver, optimizer = _driver_of(self)
        driver.zero_grad_of(optimizer, set_to_none)

    for name in ("hooked", "_wrapped_by_lr_sched"):  # by the driver, which runs hooks and notes the call
        setattr(step, name, True)
    names = ("__module__", "__qualname__", "__doc__")
    own = {"step": step, "zero_grad": zero_grad} | {name: getattr(kind, name) for name in names}
    return types.new_class(kind.__name__, (kind,), exec_body=lambda body: body.update(own))


def _driver_of(optimizer: Optimizer) -> tuple[Boundary, Optimizer]:
    """The driver and the optimizer that it knows: `optimizer` may be a wrapper that has made itself one of
    its class and looks up the rest in it, as Lightning's do."""
    driver, known = (each() for each in getattr(optimizer, _DRIVER))
    if driver is None or known is None:
        raise UsageError(
            "the engine that this optimizer belongs to no longer exists, or has got another one by "
            "engine.attach: keep what zero.initialize returns, and step the optimizer that it has"
        )
    return driver, known


def _refuse_to_save(optimizer: Optimizer) -> None:
    raise UsageError(
        "optimizer.state_dict() would hold only this rank's slices: engine.save_checkpoint saves the "
        "optimizer's whole state, engine.full_optimizer_state(name) returns that of a parameter, and "
        "optimizer.param_groups has the hyper-parameters"
    )


def _refuse_to_copy() -> None:
    raise UsageError(
        "an optimizer that an engine steps cannot be copied or pickled, because it has only this rank's "
        "slices: engine.save_checkpoint saves its whole state"
    )


def _refuse_to_add(param_group: dict[str, Any]) -> None:
    raise OptimizerError(
        "optimizer.add_param_group() was called after zero.initialize, but the engine has no shards of what "
        "it adds: give the optimizer all parameters before that. Those to be trained later may be frozen "
        "after it, with requires_grad_(False), until then"
    )


def _refuse_to_load(optimizer: Optimizer, state: dict[str, Any]) -> None:
    raise UsageError(
        "optimizer.load_state_dict() would not change the state that the engine steps: use "
        "engine.load_checkpoint to load what engine.save_checkpoint saved, and set hyper-parameters in "
        "optimizer.param_groups"
    )
