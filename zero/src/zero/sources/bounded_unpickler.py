"""Python's unpickler, made to do bounded work and nothing but build; what it may call and change is here.

The unpickler used is the one written in Python: with the one in C, a few bytes can claim any amount of
memory. Every step costs one, and a call costs what it has to look at, so that no file makes more work than
its budget allows. Keys are small, since hashing is recursive and repeated at every use; what is built has
neither cycles of plain containers nor great depth, so that whoever reads it may recurse.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from io import BytesIO
from typing import Any

_TOO_MUCH = "reading it takes more steps than any file of weights needs"
_MOST_IN_A_KEY = 256  # values in nested tuples, such as a tensor's sizes
_DEEPEST = 100
_NEW_SET = 4  # steps, since it takes that much more memory than other containers
CONTAINERS = (list, tuple, dict, set, frozenset)
_Pickled: Any = pickle._Unpickler
_Stop: Any = pickle._Stop  # type: ignore[attr-defined]


class Inert:
    """Stands in for an object, and keeps its stored state without using it."""

    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments


class Stranger(Inert):
    """Stands in for any object or function, called `name`, and keeps whatever its pickle does with it."""

    name = ""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.taken: list[Any] = []  # by calls, and as items of something like a list, a set or a dict


class Dict(dict[Any, Any]):
    """Stands in for dicts that have state besides their items, as a module's state dict has versions."""


class Function:
    """Stands in for a function. A plain function would let a pickle set its attributes."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)


_SIZED = frozenset({str, bytes, bytearray, *CONTAINERS, Dict})
_NESTING = frozenset({*CONTAINERS, Dict})  # exactly these: a tensor is a tuple, too
_KEYS = (str, bytes, int, float, complex, type(None), frozenset, Inert, Function, type)


def check_keys(keys: Iterable[Any]) -> None:
    """Raise ValueError unless all values are small enough to be hashed again and again."""
    for key in keys:
        if not isinstance(key, (str, Inert)):
            _check_key(key)


def check_depth(value: Any) -> None:
    """Raise ValueError if plain containers are nested too deep, or hold themselves."""
    heights: dict[int, int] = {}  # 0 while what is inside is being measured
    left = [value]
    while left:
        key = id(left[-1])
        if heights.get(key, 0):  # another has held it, too
            left.pop()
            continue
        inner = _containers_in(left[-1])
        if key not in heights:
            heights[key] = 0
            if any(heights.get(child) == 0 for child in inner):
                raise ValueError("a container holds itself")
            left.extend(value for child, value in inner.items() if child not in heights)
        else:
            heights[key] = 1 + max(map(heights.__getitem__, inner), default=0)
            if heights[key] > _DEEPEST:
                raise ValueError(f"it is nested more than {_DEEPEST} deep")
            left.pop()


def _containers_in(value: Any) -> dict[int, Any]:
    """The plain containers directly in a value, by their identity."""
    inside = value.values() if isinstance(value, dict) else value if type(value) in _NESTING else ()
    return {id(child): child for child in inside if type(child) in _NESTING}


def _check_key(key: Any) -> None:
    left, found = [key], 0
    while left:
        value = left.pop()
        found += 1
        if isinstance(value, tuple):
            left.extend(value[: _MOST_IN_A_KEY + 1])
        if found + len(left) > _MOST_IN_A_KEY:
            raise ValueError("a key of a dict is too large")
        if type(value) is int and value.bit_length() > 64:
            raise ValueError("a key of a dict is a number of more than 64 bits")
        if not isinstance(value, (*_KEYS, tuple)):
            raise ValueError(f"a key of a dict is a {type(value).__name__}")


def made_set(values: Iterable[Any] = ()) -> set[Any]:
    """A set, if its values may be keys."""
    values = list(values)
    check_keys(values)
    return set(values)


def made_dict(items: Any = ()) -> Dict:
    """A dict from another, or from pairs, if their keys may be keys."""
    if not items:
        return Dict()
    pairs = list(items.items() if isinstance(items, dict) else items)
    check_keys(key for key, _ in pairs)
    return Dict(pairs)


class Unpickler(_Pickled):
    """Reads one pickle. most: the steps that it may take. load() raises whatever a hostile one provokes."""

    def __init__(self, data: bytes, most: int) -> None:
        file = BytesIO(data)
        self._left = most
        super().__init__(file)
        self.read, self.readinto, self.readline = file.read, file.readinto, file.readline

    def load(self) -> Any:
        self.metastack: list[Any] = []
        self.stack: list[Any] = []
        self.append = self.stack.append
        self.proto = 0
        read, opcodes = self.read, _OPCODES
        try:
            for _ in range(self._left):  # calls are counted apart: this is as fast as counting nothing
                opcodes[read(1)[0]](self)
        except _Stop as stop:
            check_depth(stop.value)
            return stop.value
        raise ValueError(_TOO_MUCH)

    def spend(self, steps: int) -> None:
        """Take steps from what is left of the budget."""
        self._left -= steps
        if self._left < 0:
            raise ValueError(_TOO_MUCH)

    def call(self, function: Any, arguments: Any) -> Any:
        """Make what a pickle asks for, with what stands in for a class or a function."""
        known = isinstance(function, (Function, Stranger))
        if not (known or (isinstance(function, type) and issubclass(function, Inert))):
            raise ValueError(f"it calls a {type(function).__name__}")
        if type(arguments) is not tuple:
            raise ValueError("it calls something without arguments")
        self.spend(len(arguments) + sum([len(value) for value in arguments if type(value) in _SIZED]))
        if isinstance(function, Stranger):
            function.taken.extend(arguments)
            return function
        return function(*arguments)

    def _take(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list and not isinstance(target, Stranger):
            raise ValueError(f"it appends to a {type(target).__name__}")
        (target if isinstance(target, list) else target.taken).extend(values)

    def _set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, Stranger):
            target.taken.extend(items)
            return
        if not isinstance(target, dict):
            raise ValueError(f"it sets items of a {type(target).__name__}")
        check_keys(items[::2])
        target.update(zip(items[::2], items[1::2], strict=True))

    # -- what replaces the unpickler's own opcodes, by the names that they have there -------------------

    def load_frame(self) -> None:
        self.read(8)  # its length: all of the file is in memory anyway

    def load_reduce(self) -> None:
        arguments = self.stack.pop()
        self.stack[-1] = self.call(self.stack[-1], arguments)

    def load_newobj(self) -> None:
        arguments, kind = self.stack.pop(), self.stack.pop()
        if not isinstance(kind, type):
            raise ValueError(f"it makes an object of a {type(kind).__name__}")
        self.append(self.call(kind, arguments))

    def load_newobj_ex(self) -> None:
        named = self.stack.pop()
        self.load_newobj()
        self.stack[-1].named = named

    def _instantiate(self, kind: Any, arguments: list[Any]) -> None:
        self.append(self.call(kind, tuple(arguments)))

    def load_build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, Inert):
            target.state = state
        elif not isinstance(target, Dict):
            raise ValueError(f"it sets the state of a {type(target).__name__}")

    def load_append(self) -> None:
        value = self.stack.pop()
        self._take([value])

    def load_appends(self) -> None:
        self._take(self.pop_mark())

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set_items([key, value])

    def load_setitems(self) -> None:
        self._set_items(self.pop_mark())

    def load_dict(self) -> None:
        items = self.pop_mark()
        self.append({})
        self._set_items(items)

    def load_empty_set(self) -> None:
        self.spend(_NEW_SET)
        self.append(set())

    def load_frozenset(self) -> None:
        self.spend(_NEW_SET)
        items = self.pop_mark()
        self.append(frozenset(made_set(items)))

    def load_additems(self) -> None:
        items, target = self.pop_mark(), self.stack[-1]
        if isinstance(target, Stranger):
            target.taken.extend(items)
        elif type(target) is set:
            target |= made_set(items)
        else:
            raise ValueError(f"it adds items to a {type(target).__name__}")

    def load_bytearray8(self) -> None:
        self.append(bytearray(self.read(int.from_bytes(self.read(8), "little"))))

    def get_extension(self, code: int) -> None:
        raise ValueError(f"it uses the extension {code}")


_OPCODES = {code: getattr(Unpickler, load.__name__) for code, load in _Pickled.dispatch.items()}
