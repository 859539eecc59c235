"""What a model reaches: through attributes, containers, closures and hooks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from zero.sharding.tensors import attributes, is_atom

Part = tuple[str, Any]
"""A path, such as "layers.0.kept[1]", and the object that it leads to."""

_MOST = 200_000  # objects; a model may reach its program, and with that a data set
_OWN = ("_parameters", "_buffers", "_modules")  # whose entries are attributes of the module


def reached(model: nn.Module) -> Iterator[Part]:
    """Yield the objects that the model reaches, nearest first, each with one path to it.

    Has no effects: nothing is called, and no containers but Python's own are looked into. Ends after 200,000
    objects.
    """
    seen, waiting = {id(model)}, deque([("", model)])
    while waiting and len(seen) < _MOST:
        path, item = waiting.popleft()
        yield path, item
        for part in _parts(path, item):
            if not is_atom(part[1]) and id(part[1]) not in seen:
                seen.add(id(part[1]))
                waiting.append(part)


def _parts(path: str, item: Any) -> Iterator[Part]:
    kind = type(item)
    if issubclass(kind, nn.Module):
        yield from _of_module(path, item)
    elif issubclass(kind, dict):
        yield from ((f"{path}[{_shown(key)}]", value) for key, value in [*dict.items(item)])
    elif issubclass(kind, (list, tuple, set, frozenset, deque)):
        yield from ((f"{path}[{index}]", value) for index, value in enumerate([*item]))
    elif issubclass(kind, FunctionType):
        yield from _of_function(path, item)
    elif issubclass(kind, partial):
        yield from ((path, part) for part in (item.func, item.args, item.keywords))
    elif issubclass(kind, (MethodType, BuiltinFunctionType)):
        yield path, item.__self__
    elif not issubclass(kind, (type, ModuleType)):
        yield from ((_joined(path, name), value) for name, value in attributes(item))


def _of_module(path: str, module: nn.Module) -> Iterator[Part]:
    for name, value in [*vars(module).items()]:
        entries = value.items() if name in _OWN else [(name, value)]
        yield from ((_joined(path, entry), part) for entry, part in [*entries])


def _of_function(path: str, function: FunctionType) -> Iterator[Part]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # it has no contents yet
            yield f"{name!r} in the closure {path}", cell.cell_contents
    yield f"{path}.__defaults__", function.__defaults__
    yield f"{path}.__kwdefaults__", function.__kwdefaults__
    yield path, vars(function)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _shown(key: Any) -> str:
    return repr(key) if is_atom(key) else type(key).__name__
