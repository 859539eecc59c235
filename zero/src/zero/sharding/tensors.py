"""Finding and changing tensors in whatever a module takes or returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

_ATOMS = (str, bytes, int, float, bool, complex, type(None), torch.dtype, torch.device)


def iter_tensors(value: Any) -> Iterator[Tensor]:
    """Tensors in nested tuples, lists, dicts, dataclasses and plain objects; each object is visited once."""
    seen: set[int] = set()
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, Tensor):
            yield item
        elif not isinstance(item, _ATOMS) and id(item) not in seen:
            seen.add(id(item))
            stack.extend(_children(item))


def _children(item: Any) -> list[Any]:
    if isinstance(item, Mapping):
        return list(item.values())
    if isinstance(item, (list, tuple, set, frozenset)):
        return list(item)
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return [getattr(item, f.name) for f in dataclasses.fields(item)]
    if isinstance(item, torch.nn.Module) or callable(item):
        return []
    return list(getattr(item, "__dict__", {}).values())


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """`value` with `function` applied to the tensors in its tuples, lists, dicts and dataclasses.

    Other objects are passed through as they are.
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple):
        items = [map_tensors(function, v) for v in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [map_tensors(function, v) for v in value]
    if type(value) is dict:
        return {k: map_tensors(function, v) for k, v in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        initial = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        return dataclasses.replace(value, **{k: map_tensors(function, v) for k, v in initial.items()})
    return value
