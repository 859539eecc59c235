"""What a backend's package still has to write: methods that do nothing but raise NotImplementedError."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator

from accelz.conformance.contract import INTERFACES
from accelz.conformance.results import rank_in_order


def unwritten(package: str) -> list[str]:
    """Return "Role.method: what to write" for each such method in the package's loaded modules, in ORDER."""
    modules = [m for n, m in sys.modules.items() if n == package or n.startswith(f"{package}.")]
    return sorted((text for module in modules for text in _in_module(module)), key=rank_in_order)


def _in_module(module: types.ModuleType) -> Iterator[str]:
    for kind in vars(module).values():
        if not isinstance(kind, type) or kind.__module__ != module.__name__:
            continue
        interface = next((i.__name__ for i in INTERFACES if issubclass(kind, i)), "")
        for name, function in vars(kind).items() if interface else ():
            if isinstance(function, types.FunctionType) and _only_raises(function):
                yield f"{interface}.{name}: {_message(function)}"


def _only_raises(function: types.FunctionType) -> bool:
    return function.__code__.co_names == (NotImplementedError.__name__,)


def _message(function: types.FunctionType) -> str:
    texts = [c for c in function.__code__.co_consts if isinstance(c, str) and c != function.__doc__]
    return texts[0] if texts else "not implemented yet"
