"""The optimizer's own state dicts and copies: refused, because they would hold one rank's slices only."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from zero.errors import UsageError


def refuse_state_dicts(optimizer: Optimizer) -> None:
    """Make `optimizer.state_dict()` and `load_state_dict()` raise UsageError from now on, before anybody
    else's hooks on them run, and also `torch.save(optimizer)` and `copy.deepcopy(optimizer)`."""
    optimizer.register_state_dict_pre_hook(_refuse_to_save, prepend=True)
    optimizer.register_load_state_dict_pre_hook(_refuse_to_load, prepend=True)
    optimizer.__dict__["__getstate__"] = _refuse_to_copy


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


def _refuse_to_load(optimizer: Optimizer, state: dict[str, Any]) -> None:
    raise UsageError(
        "optimizer.load_state_dict() would not change the state that the engine steps: use "
        "engine.load_checkpoint to load what engine.save_checkpoint saved, and set hyper-parameters in "
        "optimizer.param_groups"
    )
