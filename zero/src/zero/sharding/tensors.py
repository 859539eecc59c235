"""Finding and changing tensors in whatever a module takes or returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

_ATOMS = (str, bytes, int, float, bool, complex, type(None), torch.dtype, torch.device)


def iter_tensors(value: Any) -> Iterator[Tensor]:
    """Tensors in nested tuples, lists, dicts, dataclasses and other objects; each object is visited once."""
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
    if isinstance(item, (torch.nn.Module, type, FunctionType, MethodType, BuiltinFunctionType, ModuleType)):
        return []
    slots = (name for kind in type(item).__mro__ for name in _names(kind.__dict__.get("__slots__", ())))
    return [*getattr(item, "__dict__", {}).values(), *(getattr(item, name, None) for name in slots)]


def _names(slots: Any) -> Iterable[str]:
    return (slots,) if isinstance(slots, str) else slots


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """`value` with `function` applied to the tensors in its tuples, lists, dicts and dataclasses.

    What holds no tensor that `function` changes, and other objects, are passed through as they are.
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (tuple, list)):
        items = [map_tensors(function, v) for v in value]
        if _same(items, value):
            return value
        if isinstance(value, list):
            return items
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if type(value) is dict:
        mapped = {k: map_tensors(function, v) for k, v in value.items()}
        return value if _same(mapped.values(), value.values()) else mapped
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        initial = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        changed = {k: map_tensors(function, v) for k, v in initial.items()}
        same = _same(changed.values(), initial.values())
        return value if same else dataclasses.replace(value, **changed)
    return value


def _same(new: Iterable[Any], old: Iterable[Any]) -> bool:
    return all(a is b for a, b in zip(new, old, strict=True))
