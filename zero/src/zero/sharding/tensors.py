"""Find and replace tensors in whatever a module takes or returns."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

_is_wrapped, _transform = (
    torch._C._functorch.is_functorch_wrapped_tensor,
    torch._C._functorch.peek_interpreter_stack,
)
_ATOMS = (str, bytes, int, float, bool, complex, type(None), torch.dtype, torch.device)


def iter_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples, lists, dicts, dataclasses and other objects, visiting each once."""
    seen: set[int] = set()
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, Tensor):
            yield item
        elif not is_atom(item) and id(item) not in seen:
            seen.add(id(item))
            stack.extend(_children(item))


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
    if isinstance(item, Mapping):
        return list(item.values())
    if isinstance(item, (list, tuple, set, frozenset)):
        return list(item)
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
    for kind, of, copied in _CONTAINERS:
        if kind(value):
            parts = of(value)
            changed = {key: map_tensors(function, part) for key, part in parts.items()}
            return value if _same(changed.values(), parts.values()) else copied(value, changed)
    return value


def _items(value: Sequence[Any]) -> dict[Any, Any]:
    return dict(enumerate(value))


def _copy_of_tuple(value: tuple[Any, ...], changed: dict[Any, Any]) -> Any:
    if type(value).__module__ == "torch.return_types":
        return type(value)(changed.values())
    made = tuple.__new__(type(value), changed.values())
    if hasattr(value, "__dict__"):
        made.__dict__.update(value.__dict__)
    return made


def _copy_of_list(value: list[Any], changed: dict[Any, Any]) -> Any:
    made = copy.copy(value)
    made[:] = changed.values()
    return made


def _copy_of_mapping(value: Mapping[Any, Any], changed: dict[Any, Any]) -> Any:
    if not isinstance(value, MutableMapping):
        return type(value)(changed)  # type: ignore[call-arg]
    made = copy.copy(value)
    for key, part in changed.items():
        made[key] = part
    return made


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _fields(value: Any) -> dict[Any, Any]:
    return {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if hasattr(value, f.name)}


def _copy_of_dataclass(value: Any, changed: dict[Any, Any]) -> Any:
    made = copy.copy(value)
    for name, part in changed.items():
        object.__setattr__(made, name, part)  # frozen ones too
    return made


_CONTAINERS: tuple[tuple[Callable[[Any], bool], Callable[[Any], dict[Any, Any]], Callable[..., Any]], ...] = (
    (lambda value: isinstance(value, tuple), _items, _copy_of_tuple),
    (lambda value: isinstance(value, list), _items, _copy_of_list),
    (lambda value: isinstance(value, Mapping), dict, _copy_of_mapping),
    (_is_dataclass, _fields, _copy_of_dataclass),
)


def _same(new: Iterable[Any], old: Iterable[Any]) -> bool:
    return all(a is b for a, b in zip(new, old, strict=True))
