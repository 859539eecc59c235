"""What the optimizer object no longer does: its state dicts and copies would hold one rank's slices only, and
the engine has no shards of parameters that are added."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from zero.errors import OptimizerError, UsageError


def refuse_calls(optimizer: Optimizer) -> None:
    """Make `optimizer.state_dict()` and `load_state_dict()` raise UsageError from now on, before anybody
    else's hooks on them run; likewise `torch.save(optimizer)` and `copy.deepcopy(optimizer)`. Make
    `add_param_group()` raise OptimizerError."""
    optimizer.register_state_dict_pre_hook(_refuse_to_save, prepend=True)
    optimizer.register_load_state_dict_pre_hook(_refuse_to_load, prepend=True)
    optimizer.__dict__["__getstate__"] = _refuse_to_copy
    optimizer.__dict__["add_param_group"] = _refuse_to_add


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
