"""What takes the place of names that other engines have: an AttributeError says what to write instead."""

from __future__ import annotations

from torch import nn

_WEIGHTS = "engine.save_checkpoint(path), then `zero consolidate path weights --dtype keep`"
MIGRATION_HINTS = {
    "clip_grad_norm_": "set zero.Config(clip_norm=...); engine.grad_norm is the norm",
    "device": "engine.accelerator.device",
    "forward": "call engine(...)",
    "get_global_grad_norm": "engine.grad_norm",
    "get_lr": "read engine.optimizer.param_groups, or the scheduler",
    "global_rank": "engine.rank",
    "global_steps": "engine.steps",
    "is_gradient_accumulation_boundary": "engine.is_boundary",
    "local_rank": "the environment's LOCAL_RANK; engine.accelerator.device is this rank's device",
    "no_sync": "zero.Config(gradient_accumulation_steps=..., accumulate='local') reduces once per step",
    "save_16bit_model": _WEIGHTS,
    "save_fp16_model": _WEIGHTS,
}


def missing(name: str, module: nn.Module | None) -> AttributeError:
    """The error for an attribute that the engine of `module` does not have."""
    said = f"a zero.Engine has no attribute {name!r}"
    if name in MIGRATION_HINTS:
        return AttributeError(f"{said}: {MIGRATION_HINTS[name]}")
    if module is not None and hasattr(module, name):
        return AttributeError(f"{said}: the model is engine.module, use engine.module.{name}")
    return AttributeError(said)
