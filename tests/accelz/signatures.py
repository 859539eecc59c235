"""Every public name of accelz with its signature, as text: what backends and engines may rely on.

`python -m tests.accelz.signatures --write` puts it into signatures.txt, where a change is seen in review;
docs/api-stability.md says which changes need a new version of the interface.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import accelz
from accelz import Capabilities

CONSTANTS = (Capabilities, dict)
"""The types of constants that are part of the interface; numbers are not."""
FILE = Path(__file__).with_name("signatures.txt")


def modules() -> list[str]:
    """The public modules: those that accelz's docstring lists. The kit's tests are no interface."""
    named = re.findall(r"^(accelz\.[\w.]+)  ", accelz.__doc__ or "", re.MULTILINE)
    return ["accelz", *(name for name in named if name != "accelz.conformance")]


def text() -> str:
    return "\n".join(line for name in modules() for line in _module(name)) + "\n"


def _module(name: str) -> Iterator[str]:
    module = import_module(name)
    yield f"\n# {name}\n"
    for public in sorted(getattr(module, "__all__", None) or _own(module)):
        yield from _value(public, getattr(module, public))


def _own(module: Any) -> list[str]:
    """The names that a module without `__all__` defines itself, and those that it exports as themselves."""
    exported = re.findall(r"import (\w+) as \1\b", inspect.getsource(module))
    own = [
        name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__
    ]
    constants = [n for n, value in vars(module).items() if n.isupper() and isinstance(value, CONSTANTS)]
    found = {name for name in {*own, *constants, *exported} if not name.startswith("_")}
    return [name for name in found if not isinstance(getattr(module, name), TypeVar)]


def _value(name: str, value: Any) -> Iterator[str]:
    if not str(getattr(value, "__module__", "accelz")).startswith("accelz"):
        yield f"{name}: of {value.__module__.partition('.')[0]}"
    elif inspect.isclass(value):
        yield f"class {name}({', '.join(base.__name__ for base in value.__bases__)})"
        yield from (f"    {line}" for line in _members(value))
    elif callable(value):
        yield _signature(name, value)
    else:
        yield f"{name} = {_shown(value)}"


def _members(cls: type) -> Iterator[str]:
    if is_dataclass(cls):
        for field in fields(cls):
            default = "" if field.default is MISSING else f" = {_shown(field.default)}"
            yield f"{field.name}: {field.type}{default}"
    elif "__init__" in vars(cls):
        yield _signature("__init__", vars(cls)["__init__"])
    for name, member in sorted(vars(cls).items()):
        if name.startswith("_") or (is_dataclass(cls) and name in {field.name for field in fields(cls)}):
            continue
        function = getattr(member, "__func__", member)
        if isinstance(member, property):
            yield f"{name}: property"
        elif inspect.isfunction(function):
            abstract = "abstract " if getattr(function, "__isabstractmethod__", False) else ""
            yield abstract + _signature(name, function)
        else:
            yield f"{name} = {_shown(member)}"


def _signature(name: str, function: Any) -> str:
    signature = inspect.signature(function)
    parameters = [
        p if p.default is p.empty else p.replace(default=_Default(p.default))
        for p in signature.parameters.values()
    ]
    return f"{name}{signature.replace(parameters=parameters)}".replace("'", "")


class _Default:
    def __init__(self, value: Any) -> None:
        self._value = value

    def __repr__(self) -> str:
        return _shown(self._value)


def _shown(value: Any) -> str:
    """The value, without what differs from process to process."""
    if is_dataclass(value) and not isinstance(value, type):
        shown = (f"{field.name}={_shown(getattr(value, field.name))}" for field in fields(value))
        return f"{type(value).__name__}({', '.join(shown)})"
    if isinstance(value, frozenset):
        return f"{{{', '.join(sorted(map(repr, value)))}}}"
    return re.sub(r"\bat 0x\w+", "", repr(value))


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        FILE.write_text(text())
    else:
        print(text())
