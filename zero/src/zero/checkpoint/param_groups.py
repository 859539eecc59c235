"""What param_groups take over from a checkpoint: options, such as learning rates, checked and then set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from accelz import HOST


def misfits(group: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """What is wrong with the options `saved` for a group that has others of the same names now."""
    return [
        f"{name} is {_told(value)} instead of {_kind(group[name])}"
        for name, value in saved.items()
        if name in group and not _fits(group[name], value)
    ]


def merged(group: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a group has after `take`."""
    return {**group, **{name: _as_now(group.get(name), value) for name, value in saved.items()}}


def take(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Set a group's options. Tensors stay the same objects, as captured graphs read them."""
    for name, value in saved.items():
        if isinstance(group.get(name), Tensor):
            group[name].copy_(value if isinstance(value, Tensor) else torch.tensor(value, device=HOST))
        else:
            group[name] = _as_now(group.get(name), value)


def _fits(now: Any, value: Any) -> bool:
    if isinstance(now, Tensor):
        return _is_number(value) if not isinstance(value, Tensor) else value.shape in (now.shape, ())
    if _is_number(now):
        return _is_number(value) or (isinstance(value, Tensor) and value.numel() == 1)
    if isinstance(now, (tuple, list)):
        same = isinstance(value, (tuple, list)) and len(now) == len(value)
        return same and all(map(_fits, now, value))
    if isinstance(now, bool):
        return value is None or isinstance(value, bool)
    return now is None or isinstance(value, type(now))


def _as_now(now: Any, value: Any) -> Any:
    """A number stays one, where another program had a tensor for it."""
    return value.item() if _is_number(now) and isinstance(value, Tensor) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _kind(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__} of {', '.join(map(_kind, value))}"
    return f"Tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _told(value: Any) -> str:
    return _kind(value) if isinstance(value, Tensor) else repr(value)[:60]
