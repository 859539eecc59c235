"""What takes the place of names and arguments of other engines: an error says what to write instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import ParamSpec, TypeVar

from torch import nn

from zero.errors import UsageError

P = ParamSpec("P")
R = TypeVar("R")

_WEIGHTS = "engine.save_checkpoint(path), then `zero consolidate path weights --dtype keep`"
MIGRATION_HINTS = {
    "forward": "call engine(...)",
    "get_global_grad_norm": "engine.grad_norm",
    "get_lr": "read engine.optimizer.param_groups, or the scheduler",
    "global_rank": "engine.rank",
    "global_steps": "engine.steps",
    "is_gradient_accumulation_boundary": "engine.is_boundary",
    "local_rank": "the environment's LOCAL_RANK; engine.device is this rank's device",
    "save_16bit_model": _WEIGHTS,
    "save_fp16_model": _WEIGHTS,
}
_PATH = "give the checkpoint's own path, e.g. f'{folder}/{tag}'"
_ALWAYS_WHOLE = "the result is the whole model, detached, under its own names: change the dict that you get"
ARGUMENT_HINTS: Mapping[str, Mapping[str, str]] = {
    "backward": {
        "retain_graph": "a backward ends with its graph; add up losses that share a forward, and call "
        "engine.backward(loss_a + loss_b) once",
        "create_graph": "compute what you need of gradients with torch.autograd.grad(..., create_graph=True) "
        "before, and add it to the loss",
        "inputs": "freeze the parameters that shall have no gradient, with requires_grad_(False), before the "
        "forward",
        "gradient": "multiply the loss by it",
        "scale_wrt_gas": "micro-batches count alike; for another weight, multiply the loss by it",
    },
    "step": {
        "closure": "run forward and engine.backward(loss) first; optimizers that need a closure are refused",
        "lr_kwargs": "call the scheduler's step() yourself, with these arguments",
    },
    "zero_grad": {"set_to_none": "gradients are dropped in any case; call engine.zero_grad()"},
    "state_dict": {
        "destination": _ALWAYS_WHOLE,
        "prefix": _ALWAYS_WHOLE,
        "keep_vars": _ALWAYS_WHOLE,
    },
    "load_state_dict": {"assign": "values are copied into the shards in any case; remove it"},
    "save_checkpoint": {
        "tag": _PATH,
        "client_state": "pass it as state=",
        "save_latest": "`latest` always points to the newest checkpoint; remove it",
        "exclude_frozen_parameters": "pass trainable_only=True, which leaves out buffers, too",
    },
    "load_checkpoint": {
        "tag": _PATH,
        "load_module_strict": "pass it as strict=",
        "load_module_only": "pass it as weights_only=",
        "load_optimizer_states": "pass weights_only=True to leave them out",
        "load_lr_scheduler_states": "pass the scheduler in restore= to have it restored",
    },
}
"""What to do instead of passing an argument, by the engine's method and the argument's name."""


def missing(name: str, module: nn.Module | None) -> AttributeError:
    """The error for an attribute that the engine of `module` does not have."""
    said = f"a zero.Engine has no attribute {name!r}"
    if name in MIGRATION_HINTS:
        return AttributeError(f"{said}: {MIGRATION_HINTS[name]}")
    if module is not None and hasattr(module, name):
        return AttributeError(f"{said}: the model is engine.module, use engine.module.{name}")
    return AttributeError(said)


def explained(method: Callable[P, R]) -> Callable[P, R]:
    """Have a method of the engine raise UsageError, with the hint, for arguments in ARGUMENT_HINTS."""
    hints = ARGUMENT_HINTS[method.__name__]

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name in hints:
                raise UsageError(f"engine.{method.__name__}() takes no {name}=: {hints[name]}")
        return method(*args, **kwargs)

    return call
