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
_NUMBER = "the program's own number: that of its data loader"
MIGRATION_HINTS = {
    "_zero3_consolidated_16bit_state_dict": "engine.state_dict(), on every rank",
    "bfloat16_enabled": "engine.config.precision",
    "cur_scale": "engine.loss_scale",
    "data_parallel_group": "the process_group= that zero.initialize was given, else all ranks'",
    "destroy": "nothing: drop the engine, the model and the optimizer",
    "dp_world_size": "engine.world_size",
    "empty_partition_cache": "nothing: a unit's whole values are released after each use",
    "forward": "call engine(...)",
    "fp16_enabled": "engine.config.precision",
    "get_global_grad_norm": "engine.grad_norm",
    "get_lr": "read engine.optimizer.param_groups, or the scheduler",
    "global_rank": "engine.rank",
    "global_samples": "engine.steps times the batch size",
    "global_steps": "engine.steps",
    "gradient_accumulation_steps": "engine.config.gradient_accumulation_steps, a number or None",
    "gradient_clipping": "engine.config.clip_norm",
    "is_gradient_accumulation_boundary": "engine.is_boundary",
    "local_rank": "the environment's LOCAL_RANK; engine.device is this rank's device",
    "lr_scheduler": "the program's own, which it steps after engine.step(); or have "
    "zero.integrations.deepspeed.initialize step it",
    "micro_steps": "the program's own count",
    "module_state_dict": "engine.state_dict(), on every rank",
    "save_16bit_model": _WEIGHTS,
    "save_fp16_model": _WEIGHTS,
    "set_gradient_accumulation_boundary": "with engine.no_sync(): around the backwards before the last",
    "set_lr": "write to engine.optimizer.param_groups",
    "train_batch_size": _NUMBER,
    "train_micro_batch_size_per_gpu": _NUMBER,
    "was_step_applied": "what engine.step() returns, and engine.skipped_steps",
    "zero_optimization_stage": "engine.config.stage",
}
_PLAIN = "call {}, which works without gradient_accumulation_steps"
_PATH = "give the checkpoint's own path, e.g. f'{folder}/{tag}'"
_ALWAYS_WHOLE = "the result is the whole model, detached, under its own names: change the dict that you get"
ARGUMENT_HINTS: Mapping[str, Mapping[str, str]] = {
    "backward": {
        "retain_graph": f"{_PLAIN.format('loss.backward(retain_graph=True)')}; or add up losses that share a "
        "forward, and call engine.backward(loss_a + loss_b) once",
        "create_graph": "compute what you need of gradients with torch.autograd.grad(..., create_graph=True) "
        "before, and add it to the loss",
        "inputs": "freeze the parameters that shall have no gradient, with requires_grad_(False), before the "
        "forward",
        "gradient": f"{_PLAIN.format('output.backward(gradient=...)')}; or multiply the loss by it",
        "scale_wrt_gas": "micro-batches count alike; for another weight, multiply the loss by it",
    },
    "step": {
        "closure": f"{_PLAIN.format('optimizer.step(closure)')}; or run forward and engine.backward(loss) "
        "first. Optimizers that call a closure more than once are refused",
        "lr_kwargs": "call the scheduler's step() yourself, with these arguments",
    },
    "zero_grad": {
        "set_to_none": "engine.zero_grad() drops gradients; optimizer.zero_grad(set_to_none=False), "
        "which works without gradient_accumulation_steps, makes them zero"
    },
    "state_dict": {"destination": _ALWAYS_WHOLE, "prefix": _ALWAYS_WHOLE, "keep_vars": _ALWAYS_WHOLE},
    "load_state_dict": {"assign": "values are copied into the shards in any case; remove it"},
    "save_checkpoint": {
        "tag": _PATH,
        "client_state": "pass it as state=; load_checkpoint returns it in .state",
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

TUPLE_HINTS = {
    "Engine": "zero.initialize returns the engine alone, the optimizer and the scheduler stay the program's: "
    "write engine = zero.initialize(model, optimizer, config). All four come from "
    "zero.integrations.deepspeed.initialize",
    "Loaded": "load_checkpoint returns one object: write loaded = engine.load_checkpoint(path), then "
    "loaded.path and loaded.state",
}
"""What to write instead of unpacking a result, by its class."""


def no_tuple(name: str) -> TypeError:
    """The error for a result of the class `name` that is unpacked as if it were a tuple."""
    return TypeError(f"a zero.{name} is no tuple: {TUPLE_HINTS[name]}")


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
        if "tag" in hints and any(isinstance(second, str) for second in args[2:3]):
            raise UsageError(f"engine.{method.__name__}() takes no tag {args[2]!r}: {hints['tag']}")
        return method(*args, **kwargs)

    return call
