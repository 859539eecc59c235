"""Find and replace tensors in whatever a module takes or returns."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_transform = torch._C._functorch.peek_interpreter_stack
_ATOMS = (str, bytes, int, float, bool, complex, type(None), torch.dtype, torch.device)


def iter_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples, lists, dicts, dataclasses and other objects, visiting each once."""
    seen: dict[int, Any] = {}  # by id, which another object would get if one of these were freed
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, Tensor):
            yield item
        elif type(item) not in _ATOMS and id(item) not in seen:
            seen[id(item)] = item
            stack += item if type(item) in (tuple, list) else _children(item)


def with_inner(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return tensors and, where torch.func or forward-mode AD is on, those inside them and their tangents.

    Autograd may come to any of them: a transform's own to the outer ones, the loss's to the innermost.
    """
    found = list(tensors)
    duals = forward_ad._current_level >= 0
    if not duals and _transform() is None:
        return found
    for tensor in found:  # grows meanwhile
        if _is_wrapped(tensor):
            found.append(torch._C._functorch.get_unwrapped(tensor))
        tangent = forward_ad.unpack_dual(tensor).tangent if duals and tensor.is_floating_point() else None
        if tangent is not None:
            found.append(tangent)
    return found


def is_atom(item: Any) -> bool:
    """Return whether an object is of a kind that holds no other objects."""
    return isinstance(item, _ATOMS)


def attributes(item: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes that an object itself has, with their names."""
    yield from [*getattr(item, "__dict__", {}).items()]
    for kind in type(item).__mro__:
        for name in _names(kind.__dict__.get("__slots__", ())):
            yield name, getattr(item, name, None)


def _children(item: Any) -> list[Any]:
    if isinstance(item, (dict, Mapping)):
        return list(item.values())
    if isinstance(item, (list, tuple, set, frozenset)):
        return list(item)
    if is_atom(item):
        return []
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return [getattr(item, f.name) for f in dataclasses.fields(item)]
    if isinstance(item, (torch.nn.Module, type, FunctionType, MethodType, BuiltinFunctionType, ModuleType)):
        return []
    return [value for _, value in attributes(item)]


def _names(slots: Any) -> Iterable[str]:
    return (slots,) if isinstance(slots, str) else slots


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return `value` with `function` applied to the tensors in its tuples, lists, mappings and dataclasses.

    A container in which something changes is replaced by a copy of its type, with everything else it has.
    Containers with no tensor that `function` changes, and other objects, are passed through as they are.
    """
    if isinstance(value, Tensor):
        return function(value)
    parts = _parts(value)
    changed = {key: map_tensors(function, part) for key, part in parts.items()}
    return value if all(changed[key] is part for key, part in parts.items()) else _copied(value, changed)


def _parts(value: Any) -> dict[Any, Any]:
    """Return what a container has, by index, key or field; nothing for other objects."""
    if isinstance(value, (tuple, list)):
        return dict(enumerate(value))
    if isinstance(value, Mapping):
        return dict(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if hasattr(value, f.name)}
    return {}


def _copied(value: Any, parts: dict[Any, Any]) -> Any:
    """Return a container of the same type with these parts."""
    if isinstance(value, tuple):
        if type(value).__module__ == "torch.return_types":
            return type(value)(parts.values())
        made = tuple.__new__(type(value), parts.values())
        if hasattr(value, "__dict__"):
            made.__dict__.update(value.__dict__)
        return made
    if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        return type(value)(parts)  # type: ignore[call-arg]
    copied: Any = copy.copy(value)
    if isinstance(value, list):
        copied[:] = parts.values()
    elif isinstance(value, MutableMapping):
        for key, part in parts.items():
            copied[key] = part
    else:
        for name, part in parts.items():
            object.__setattr__(copied, name, part)  # frozen dataclasses too
    return copied
