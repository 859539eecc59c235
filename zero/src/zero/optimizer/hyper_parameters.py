"""The hyper-parameters that programs change, which must be the same on all ranks."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from accelz import HOST

SCHEDULED = ("lr", "weight_decay", "momentum", "betas", "eps", "nesterov", "maximize")


def scheduled(optimizer: Optimizer) -> dict[str, Any]:
    """Their values by where they stand, as JSON. Those on a device are left out, because reading them would
    wait."""
    return {
        f"param_groups[{index}][{name!r}]": _plain(group[name])
        for index, group in enumerate(optimizer.param_groups)
        for name in SCHEDULED
        if name in group and not _on_device(group[name])
    }


def _plain(value: Any) -> Any:
    if type(value) in (float, int, bool):
        return float(value)
    if hasattr(value, "tolist"):  # tensors and arrays, which may have several elements
        value = value.tolist()
    if isinstance(value, (tuple, list)):
        return [_plain(each) for each in value]
    return float(value) if hasattr(value, "__float__") else None


def _on_device(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_on_device, value))
    return isinstance(value, Tensor) and value.device != HOST
