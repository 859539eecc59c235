"""Layers that multiply in 8 bits, as torchao's for training in float8 do, on a device that may not.

They say how in `linear_mm_config` and `config`, which is torchao's `Float8LinearConfig`; nothing is imported.
"""

from __future__ import annotations

from typing import Any, Literal

from torch import nn

from accelz import Accelerator
from zero.errors import ModelError

Scaling = Literal["none", "tensorwise", "rowwise"]

_SCALES: dict[Scaling, str] = {"tensorwise": "a scale for each matrix", "rowwise": "a scale for each row"}
_OTHER_RECIPE = 'Float8LinearConfig.from_recipe_name("tensorwise"), '


def check_float8_layers(model: nn.Module, accelerator: Accelerator) -> None:
    """Raise ModelError if a layer multiplies in 8 bits with scales that the device does not declare."""
    capabilities = accelerator.capabilities
    for name, module in model.named_modules():
        scaling = scaling_of(module)
        if not capabilities.scales(scaling):
            fewer = _OTHER_RECIPE if capabilities.scales("tensorwise") else ""
            raise ModelError(
                f"layer {name!r} is a {type(module).__name__} that multiplies in float8 with "
                f"{_SCALES[scaling]}, which the device {accelerator.name!r} does not do (its backend "
                f"declares scaled_mm={capabilities.scaled_mm!r}): convert the model with {fewer}"
                "Float8LinearConfig(emulate=True), which multiplies the same values in the layer's dtype, or "
                "train on another device"
            )


def scaling_of(module: nn.Module) -> Scaling:
    """The scales with which a layer multiplies in 8 bits; "none" for one that does not, or emulates it."""
    config: Any = getattr(module, "config", None) if hasattr(module, "linear_mm_config") else None
    if getattr(config, "emulate", True):
        return "none"
    casts = [cast for name, cast in vars(config).items() if name.startswith("cast_config_")]
    granularities = {
        cast.scaling_granularity.value for cast in casts if cast.scaling_type.value != "disabled"
    }
    if "axiswise" in granularities:
        return "rowwise"
    return "tensorwise" if granularities else "none"
