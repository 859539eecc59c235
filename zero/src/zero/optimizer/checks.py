"""Which optimizers the engine accepts."""

from __future__ import annotations

from torch import Tensor, nn
from torch.optim import Optimizer

from zero.config.training import Config
from zero.errors import OptimizerError, some
from zero.optimizer.joint import members, name_of
from zero.optimizer.kernel_rules import rule_for
from zero.optimizer.stepping import LOOKS_AT_MATRICES, is_known
from zero.warning import warn

NEVER = {"LBFGS": "it calls its closure many times in a step", "SparseAdam": "it needs sparse gradients"}


def check_optimizer(optimizer: Optimizer, model: nn.Module, config: Config) -> dict[nn.Parameter, int]:
    """The param group of each parameter; raises OptimizerError if the engine cannot take the optimizer."""
    for kind in (type(each).__name__ for each in members(optimizer)):
        if kind in NEVER:
            raise OptimizerError(f"{kind} cannot be sharded: {NEVER[kind]}; use another optimizer")
    for each in members(optimizer):
        if not hasattr(each, "_optimizer_step_pre_hooks"):
            raise OptimizerError(
                f"{type(each).__name__} has not called torch.optim.Optimizer's __init__, without which "
                "no hooks can be registered on its step: call it there, or pass the optimizer that it wraps"
            )
    if beside := [repr(key) for key in optimizer.state if not isinstance(key, Tensor)]:
        raise OptimizerError(
            f"the optimizer's state has entries that are of no parameter: {some(beside)}. The engine would "
            "drop them: keep such values in param_groups, or as attributes of the optimizer"
        )
    if any(float(state.get("step", 1)) != 0 for state in optimizer.state.values()):
        raise OptimizerError(
            "the optimizer already has state; call zero.initialize before its first step, and restore state "
            "with engine.load_checkpoint"
        )
    if members(optimizer):
        _check_whole_parameters(optimizer, config)
        _check_kept_state(optimizer, config)
    return _param_groups(optimizer, model)


def _check_whole_parameters(optimizer: Optimizer, config: Config) -> None:
    if config.stage == 0:
        return
    bases = {base.__name__ for each in members(optimizer) for base in type(each).__mro__}
    kind = ", ".join(bases & LOOKS_AT_MATRICES)
    if config.whole_parameters is False and kind:
        raise OptimizerError(f"{kind} needs whole matrices: remove Config(whole_parameters=False)")
    if config.whole_parameters and all(rule_for(each) is not None for each in members(optimizer)):
        raise OptimizerError(
            f"{name_of(optimizer)} works element by element, so a kernel steps its slices: remove "
            "Config(whole_parameters=True)"
        )
    if config.whole_parameters is None:
        _warn_of_strangers(optimizer)


def _check_kept_state(optimizer: Optimizer, config: Config) -> None:
    rules = [rule_for(each) for each in members(optimizer)]
    if config.masters != "fp32" and not any(rules):
        raise OptimizerError(
            f"{name_of(optimizer)} steps fp32 masters itself, so Config(masters={config.masters!r}) would "
            "change nothing: remove it, or use Adam, AdamW, SGD or zero.Lion, which kernels step"
        )
    if config.moments != "fp32" and not any(rule is not None and rule.moments for rule in rules):
        raise OptimizerError(
            f"{name_of(optimizer)} has no moments that a kernel keeps, so Config(moments={config.moments!r}) "
            "would change nothing: remove it, or use Adam, AdamW, SGD with momentum or zero.Lion"
        )


def _warn_of_strangers(optimizer: Optimizer) -> None:
    strangers = [type(each).__name__ for each in members(optimizer) if not is_known(each)]
    if strangers:
        warn(
            f"{' and '.join(strangers)} will step whole parameters, each on one rank. That is exact if it "
            "steps every parameter by itself, from its own gradient; an optimizer that looks at all of them "
            "together would see only some. Config(whole_parameters=True) states that it does not"
        )


def _param_groups(optimizer: Optimizer, model: nn.Module) -> dict[nn.Parameter, int]:
    mine = set(model.parameters())
    owner: dict[nn.Parameter, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if parameter not in mine:
                raise OptimizerError(
                    f"param_groups[{index}]['params'][{position}] of shape {tuple(parameter.shape)} is not a "
                    "parameter of the model; build the optimizer from this model's parameters"
                )
            owner[parameter] = index
    trainable = any(p.requires_grad for p in mine) and bool(members(optimizer))
    if trainable and not any(p.requires_grad for p in owner):
        raise OptimizerError("the optimizer has no trainable parameter of the model")
    return owner
